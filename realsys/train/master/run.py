"""The phases of a run, from the checkpoint it starts at to the exported model.

    find start ─> roll the ledger back ─> connect ─> load, or warm up ─> publish ─> evaluate ─> train
        ─> evaluate ─> export

Every start takes this way: the first one, the restart of a trainer that died, and a finished
or stopped run that is started again (``realsys.train.master.recovery``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.algorithm import dataflows
from realsys.algorithm.balance import CostFunction
from realsys.cluster.aio import from_thread, in_thread, on_disk, unless
from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.topology import Mesh, place, routing_table
from realsys.cluster.worker import WorkerContext
from realsys.config.allocation import ACTOR, has_servers, parse_allocation
from realsys.config.dataflow import Dataflow, can_measure, dataflow_of, is_supervised, role_settings, saved_roles
from realsys.config.doors import LOOP
from realsys.config.evaluation_sets import DEMOS, evaluation_sets, id_of_set
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT, TRAIN
from realsys.data.learning import learning_data
from realsys.data.prompts import PromptDataset
from realsys.data.submitted import SubmittedWriter
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import StreamError
from realsys.manager.client import ManagerClient
from realsys.manager.messages import RollBackRequest
from realsys.model_calls import InitializeRequest, SamplesArrived
from realsys.observe.step_log import StepRecord, surviving_steps
from realsys.session import Session, run_script
from realsys.train.master import script_service, serving
from realsys.train.master.checkpoints import Checkpoints, CheckpointSources
from realsys.train.master.devices import Devices
from realsys.train.master.executor import GraphExecutor
from realsys.train.master.intake import Intake
from realsys.train.master.intake_decisions import IntakeSettings, IntakeState
from realsys.train.master.learned_rows import LearnedRows
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.publish import Publisher, VersionKey
from realsys.train.master.recorder import StepRecorder
from realsys.train.master.recovery import (
    TrainingStart,
    evaluated,
    find_start,
    has_trained,
    read_start,
    recovered_record,
    unanswered,
)
from realsys.train.master.request_evaluations import EvaluationRequests, Repair, ResultWriter, require_completions
from realsys.train.master.session import MasterSession, SessionParts, planned_steps
from realsys.train.master.step import CallArguments, StepRunner, Warmup, WarmupParts, cost_functions, plan_roles
from realsys.train.master.step_statistics import RunStatus, StepLog
from realsys.train.master.stopping import Stopping
from realsys.train.requests import Recorded
from realsys.weights.contract import PublisherParts
from realsys.weights.contract import build_transport as build_transport

log = logging.getLogger(__name__)


class MasterRun:
    """One run of the MasterWorker.

    ``finished`` is True when all steps are trained and the model is exported; it is False after a
    run that was stopped.
    """

    def __init__(self, ctx: WorkerContext, parts: MasterParts, stop: asyncio.Event) -> None:
        self.finished = False
        self._ctx = ctx
        self._parts = parts
        self._stop = stop
        self._status = parts.status
        self._log = parts.connections.step_log
        config, stream = ctx.config, parts.connections.stream
        decisions = IntakeState(IntakeSettings.of(config), ctx.incarnation)
        intake = Intake(decisions, parts.workers, parts.connections.manager, parts.repair)
        stream.on_notice("samples_arrived", SamplesArrived, lambda notice: intake.on_samples(notice.samples))
        recorder = StepRecorder(config, ctx.paths, parts.meshes, parts.workers, ctx.incarnation, ctx.check_alive)
        stream.on_notice("recorded", Recorded, recorder.written)
        plan = functools.partial(plan_roles, config, parts.meshes, parts.costs)
        # A supervised step can be repeated from the data, so it is not recorded.
        recorder_in_use = recorder if config.record.keep_steps and parts.rows is None else None
        self._session = MasterSession(
            config,
            SessionParts(
                runner=StepRunner(config, parts.flow, parts.meshes, plan, parts.workers, recorder_in_use),
                stopping=Stopping(stop, parts.workers, ctx.paths.stopping),
                intake=intake,
                arguments=parts.arguments,
                publisher=parts.publisher,
                manager=parts.connections.manager,
                evaluations=parts.evaluations,
                checkpoints=parts.checkpoints,
                step_log=parts.connections.step_log,
                show=parts.status.show,
                devices=parts.devices,
                workers=parts.workers,
                tokenizer=parts.tokenizer,
                open_submitted=lambda: SubmittedWriter(ctx.paths.submitted, config.data, parts.train_prompts),
                rows=parts.rows,
            ),
            hf_folder=ctx.paths.root / "hf",
            total_steps=parts.total_steps,
            stop=stop,
        )
        self._sets = evaluation_sets(ctx.config)

    async def run(self) -> None:
        """Run all phases, or until ``stop`` is set and the trained steps are saved.

        Raises Fenced when another trainer has taken over.
        """
        done = await unless(self._stop, self._start())
        if done is None:
            return
        steps = await self._session.run(self._script, done)
        await unless(self._stop, self._conclude(steps))
        if not self.finished:
            # With ``checkpoint.at_end=false`` the loop has saved nothing at its end: it expects the run to finish.
            await self._parts.checkpoints.finish(stopped=True)

    async def _script(self) -> None:
        """Run the training loop that ``train.loop`` names, in a thread: what blocks it blocks nothing else."""
        name = self._ctx.config.train.loop
        if name == "session":
            await script_service.serve(self._session, self._ctx)
            return
        if name == "serve":
            await serving.serve(self._parts, self._ctx, self._stop)
            return
        loop = asyncio.get_running_loop()

        def call(method: str, *args: Any) -> Any:
            return from_thread(loop, self._session.perform, method, *args)

        session = Session(call, self._ctx.config, self._ctx.paths.root)
        # The file is imported in the thread, too: it may import torch.
        await in_thread("training loop", lambda: run_script(LOOP.load(name), session, name))

    async def _start(self) -> int:
        """Run the phases before the first step; return the steps done.

        It may be cancelled at any moment: its results are on disk, or the next start makes them
        again.
        """
        parts, cluster = self._parts, self._ctx.config.cluster
        root = self._ctx.paths.checkpoints
        resumed_from = read_start(self._ctx.paths.start).resumed_from
        # One process verifies what all ranks wrote, so it gets the time that one call gives to each
        # rank.
        timeout_s = self._ctx.config.cluster.request_timeout_s * self._parts.world_size
        start = await on_disk(f"verifying {root}", timeout_s, lambda: find_start(root, resumed_from))
        requested = await self._roll_back(start)
        await self._status.enter("connect")
        await parts.connections.stream.barrier(range(parts.world_size), cluster.start_timeout_s)
        # a reference loaded before the warm-up would be the untrained model, and its KL would pull the actor back to it
        followers = (
            []
            if start.checkpoint or not self._ctx.config.warmup.steps
            else [role for role in self._parts.meshes if role_settings(self._ctx.config, role).as_actor]
        )
        await parts.devices.take(batch=False)
        await self._status.enter("load")
        await self._initialize((role for role in parts.meshes if role not in followers), self._model_dir)
        done = await self._begin(start)
        await self._status.enter("publish")
        await parts.publisher.publish(done, done)
        if followers:
            warmed_up = self._ctx.paths.warmed_up
            await parts.publisher.export(warmed_up)
            await self._initialize(followers, lambda role: warmed_up)
        if not start.own and (start.checkpoint or self._ctx.config.warmup.steps):
            await parts.checkpoints.first(done)
        await parts.devices.give_back()
        if not has_trained(self._records()):
            await self._evaluate("before", done)
        await self._status.enter("serve" if self._ctx.config.is_service else "train")
        if start.own:
            # the results of these were lost with the predecessor of this trainer
            for eval_id, step in unanswered(self._records(), requested, done, self._sets, self._parts.total_steps):
                await self._session.start_evaluation(eval_id, step, requested_at=done)
        return done

    async def _roll_back(self, start: TrainingStart) -> list[str]:
        """Undo everything later than ``start``; return the ids of all evaluations that were ever
        requested.

        This is the first request of a start: from here on the manager grants no ticket, and it
        reissues the tickets that were granted once the weights of ``start`` are published. Raises
        Fenced, and a permanent StreamError if ledger and checkpoint do not fit together.
        """
        incarnation = self._ctx.incarnation
        request = RollBackRequest(start.step, start.step, incarnation, str(start.checkpoint or ""))
        try:
            reply = await self._parts.connections.manager.roll_back(request)
        except StreamError as error:
            # This checkpoint does not fit this ledger. Another start would meet the same two.
            error.permanent = True
            raise
        if any(True for _ in self._records()) and not self._ctx.config.is_service:
            self._log.append(recovered_record(start, incarnation))
            log.info("rolled back to version %d; %d tickets are reissued", start.step, reply.reissued)
        await self._parts.publisher.keep_pinned(reply.pins)
        await self._parts.publisher.discard_unfinished()
        return reply.evaluations

    def _records(self) -> Iterator[StepRecord]:
        """Read the records of the step log that no later recovery undid."""
        return surviving_steps(self._ctx.paths.steps)

    def _model_dir(self, role: str) -> Path:
        return model_dir(self._ctx.config, self._ctx.paths, role)

    async def _initialize(self, roles: Iterable[str], directory: Callable[[str], Path]) -> None:
        """Load ``roles`` on their meshes, each from ``directory(role)``."""
        trained = set(self._parts.flow.trained_roles)
        if self._ctx.config.warmup.steps:
            trained.add(ACTOR)
        incarnation = self._ctx.incarnation
        requests = [InitializeRequest(role, str(directory(role)), role in trained, incarnation) for role in roles]
        # All requests are sent before one is awaited, so roles on separate workers load at the same
        # time.
        await asyncio.gather(*(self._parts.workers.initialize(request) for request in requests))

    async def _begin(self, start: TrainingStart) -> int:
        """Restore the checkpoint, or warm the actor up; return the steps done."""
        if start.checkpoint:
            await self._status.enter("recover" if start.own else "resume")
            state = await self._parts.checkpoints.load(start.checkpoint)
            self._parts.arguments.load_state_dict(state.kl)
            return state.step
        if self._ctx.config.warmup.steps:
            await self._status.enter("warmup")
            config = self._ctx.config
            warmup_parts = WarmupParts(
                rows=learned_rows(self._ctx, self._parts.tokenizer, self._parts.workers, self._parts.meshes[ACTOR]),
                mesh=self._parts.meshes[ACTOR],
                cost=self._parts.costs[ACTOR],
                workers=self._parts.workers,
                executor=GraphExecutor(dataflows.sft(config), self._parts.meshes, self._parts.workers),
                step_log=self._parts.connections.step_log,
            )
            await Warmup(config.warmup, warmup_parts).run()
        return 0

    async def _conclude(self, steps: int) -> None:
        """Wait for the evaluations, evaluate once more after ``steps``, and export the model."""
        await self._parts.devices.give_back()
        for record in await self._parts.evaluations.finish_all():
            self._log.append(record)
        await self._evaluate("after", steps)
        await self._parts.publisher.export(self._ctx.paths.final_model)
        await self._status.enter("done")
        self.finished = True

    async def _evaluate(self, eval_id: str, step: int) -> None:
        """Measure held-out accuracy with the newest version, once per ``eval_id`` and step.

        Raises StuckError if all held-out completions before training failed.
        """
        records = list(self._records())
        sets = {
            name: made
            for name, made in self._sets.items()
            if made.problems and not evaluated(records, id_of_set(eval_id, name), step)
        }
        rows = self._parts.rows
        measured = rows is None or not rows.held_out_lines or evaluated(records, id_of_set(eval_id, DEMOS), step)
        if measured and not sets:
            return
        await self._status.enter("evaluate")
        if not measured:
            await self._session.measure(eval_id)
        made = await self._parts.evaluations.run(eval_id, sets, step)
        if eval_id == "before":
            require_completions(made)
        for record in made:
            self._log.append(record)


# ---- parts
#
#     connections ──> ModelWorkers ──> publisher, checkpoints ──> intake, evaluations ──> MasterSession


@dataclass(frozen=True, slots=True)
class Connections:
    """The open connections of a MasterWorker, and its step log.

    The worker that opened them closes them.
    """

    stream: MasterStream
    manager: ManagerClient
    step_log: StepLog


@dataclass(frozen=True, slots=True)
class MasterParts:
    """The parts that the phases of a run use.

    total_steps  train steps of the whole run
    train_prompts  prompts of the train split
    rows         batches of a supervised run; None: agents make them
    world_size   number of ModelWorkers
    meshes       role -> its mesh
    costs        role -> cost of one of its sequences
    repair       repairs what keeps the servers from sampling, by the status of the manager
    """

    connections: Connections
    status: RunStatus
    total_steps: int
    train_prompts: int
    rows: LearnedRows | None
    world_size: int
    flow: Dataflow
    meshes: Mapping[str, Mesh]
    costs: Mapping[str, CostFunction]
    tokenizer: TextTokenizer
    workers: ModelWorkers
    arguments: CallArguments
    publisher: Publisher
    evaluations: EvaluationRequests
    checkpoints: Checkpoints
    devices: Devices
    repair: Repair


def model_dir(config: Config, paths: TrialPaths, role: str) -> Path:
    """Return the HF directory from which ``role`` is loaded when no checkpoint is."""
    return role_settings(config, role).model_dir(paths)


def build_parts(ctx: WorkerContext, connections: Connections) -> MasterParts:
    """Build everything but the train loop.

    Raises ConfigError, ModelError and DataError for unusable input.
    """
    config, paths = ctx.config, ctx.paths
    flow = dataflow_of(config)
    allocation = parse_allocation(config.allocation)
    # The actor has a mesh even if no call of the dataflow is its own: the warm-up trains it.
    meshes = place(allocation, dict.fromkeys([ACTOR, *flow.roles]))
    tokenizer = TextTokenizer(model_dir(config, paths, ACTOR))
    train_prompts = PromptDataset(config, paths, tokenizer).size("train")
    stream = RoutedStream(connections.stream, routing_table(meshes))
    workers = ModelWorkers(stream, meshes, config.cluster.request_timeout_s)
    rows = learned_rows(ctx, tokenizer, workers, meshes[ACTOR]) if is_supervised(config) else None
    total_steps = planned_steps(config, train_prompts if rows is None else rows.lines)
    arguments = CallArguments(config, flow, total_steps)
    publisher = _build_publisher(ctx, workers)
    devices = Devices(
        connections.manager.devices,
        workers.leave_device,
        incarnation=ctx.incarnation,
        timeout_s=config.cluster.request_timeout_s,
        shared=bool(allocation.lent),
    )

    saved = {role: meshes[role] for role in saved_roles(config, flow)}
    sources = CheckpointSources(saved, workers, connections.manager.data_position, arguments.state_dict)

    async def repair(status: Mapping[str, Any]) -> None:
        await devices.repair(status)
        await publisher.repair(status)

    return MasterParts(
        connections=connections,
        status=RunStatus(ctx, connections.step_log),
        total_steps=total_steps,
        train_prompts=train_prompts,
        rows=rows,
        world_size=allocation.workers,
        flow=flow,
        meshes=meshes,
        costs=cost_functions(config, paths, list(meshes)),
        tokenizer=tokenizer,
        workers=workers,
        arguments=arguments,
        publisher=publisher,
        evaluations=EvaluationRequests(
            connections.manager,
            trainer_incarnation=ctx.incarnation,
            config=config,
            repair=repair,
            writer=ResultWriter(config, paths.evaluations),
        ),
        checkpoints=Checkpoints(config, paths, sources, incarnation=ctx.incarnation, check_alive=ctx.check_alive),
        devices=devices,
        repair=repair,
    )


def learned_rows(ctx: WorkerContext, tokenizer: TextTokenizer, workers: ModelWorkers, mesh: Mesh) -> LearnedRows:
    """Return the batches of rows of ``data.demos``: of the run if it is supervised, else of its warm-up."""
    config = ctx.config
    data = learning_data(config, ctx.paths, tokenizer)
    batch = config.train.batch_groups if is_supervised(config) else config.warmup.batch
    held_out = data.size(HELD_OUT) if can_measure(dataflow_of(config)) else 0
    return LearnedRows(workers, mesh, lines=data.size(TRAIN), held_out=held_out, batch=batch, seed=config.seed)


def _build_publisher(ctx: WorkerContext, workers: ModelWorkers) -> Publisher:
    config, paths = ctx.config, ctx.paths
    model = model_dir(config, paths, ACTOR)
    parts = PublisherParts(paths.weights(), model, ctx.incarnation, ctx.check_alive, ctx.token)
    return Publisher(
        build_transport(config).publisher(parts),
        workers,
        VersionKey(ctx.store, ctx.names.model_version(), config.cluster.lease_s, ctx.check_alive),
        incarnation=ctx.incarnation,
        transport=config.weights.transport,
        timeout_s=config.cluster.request_timeout_s,
        served=has_servers(config),
        snapshots=config.is_service,
    )
