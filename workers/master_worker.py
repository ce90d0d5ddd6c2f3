"""The MasterWorker process: finds out where to start, connects the ModelWorkers, runs warm-up, training and
evaluation, exports the result.

    where to start? ──> roll the ledger back ──> connect ──> load, or warm up ──> publish ──> evaluate ──> train ...

Every start is the same, be it the first one, that of a training side whose predecessor died, or that of a run which is
started again (``realsys.master.recovery``).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from realsys.algorithm import dataflows
from realsys.algorithm.group_filter import keep_group
from realsys.cluster.aio import run_until_stopped, stop_event, unless
from realsys.cluster.disk import on_disk
from realsys.cluster.process import training_start
from realsys.cluster.topology import place, routing_table
from realsys.cluster.worker import EXIT_STOPPED, WorkerContext, worker_main
from realsys.config.allocation import ACTOR, parse_allocation
from realsys.config.dataflow import dataflow_of, saved_roles
from realsys.config.roles import role_settings
from realsys.data.dataset_files import dataset_files
from realsys.data.demos import DemoDataset
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import StreamError
from realsys.manager.messages import RollBackRequest
from realsys.master.calls.call_arguments import CallArguments
from realsys.master.calls.executor import GraphExecutor
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.calls.plans import cost_functions, plan_roles
from realsys.master.checkpoints import Checkpoints
from realsys.master.evaluation import Evaluations
from realsys.master.intake import Intake
from realsys.master.loop import TrainLoop, planned_steps
from realsys.master.publish import Publisher, VersionKey, tell
from realsys.master.records.recorder import Recorder
from realsys.master.recovery import Start, evaluated, find_start, has_trained, recovered_record, unanswered
from realsys.master.statistics import episodes_of
from realsys.master.step import StepRunner
from realsys.master.step_log import StepLog
from realsys.master.warmup import Warmup
from realsys.rollout.manager_client import ManagerClient
from realsys.stream.head_routing import RoutedStream
from realsys.stream.request_reply import MasterStream
from realsys.stream.security import keys_for
from realsys.telemetry.steps import StepRecord, surviving_steps
from realsys.types import InitializeRequest, Recorded, SampleMeta, SamplesArrived
from realsys.weights.base import PublisherParts
from realsys.weights.build import build as build_transport

log = logging.getLogger(__name__)

_GRACE = 0.9  # of ``cluster.master_stop_s``; the rest is for closing


class Master:
    """Builds the parts in their order and runs the phases."""

    def __init__(
        self,
        ctx: WorkerContext,
        stream: MasterStream,
        manager: ManagerClient,
        step_log: StepLog,
        stop: asyncio.Event,
    ) -> None:
        config, paths = ctx.config, ctx.paths
        self._stop, self.finished = stop, False
        self._ctx, self._config, self._paths, self._manager, self._log = ctx, config, paths, manager, step_log
        self._stream = stream
        self._phase, self._shown = "start", dict[str, Any]()
        self._allocation, self._flow = parse_allocation(config.allocation), dataflow_of(config)
        self._meshes = place(self._allocation, dict.fromkeys([ACTOR, *self._flow.roles]))
        self._tokenizer = TextTokenizer(self._model_dir(ACTOR))
        total_steps = planned_steps(config, PromptDataset(config, paths, self._tokenizer).size("train"))
        routed = RoutedStream(stream, routing_table(self._meshes))
        self._workers = ModelWorkers(routed, self._meshes, config.cluster.request_timeout_s)
        self._arguments = CallArguments(config, self._flow, total_steps)
        parts = PublisherParts(paths.weights(), self._model_dir(ACTOR), ctx.incarnation, ctx.check_alive)
        self._publisher = Publisher(
            build_transport(config).publisher(parts),
            self._workers.save_weights,
            VersionKey(ctx.store, ctx.names.model_version(), config.cluster.lease_s, ctx.check_alive),
            incarnation=ctx.incarnation,
            transport=config.weights.transport,
            timeout_s=config.cluster.request_timeout_s,
        )
        self._evaluations = Evaluations(
            manager,
            trainer_incarnation=ctx.incarnation,
            seed=config.seed,
            timeout_s=config.cluster.request_timeout_s,
            mend=self._publisher.mend,
        )
        self._checkpoints = Checkpoints(
            config,
            paths,
            meshes={role: self._meshes[role] for role in saved_roles(config, self._flow)},
            workers=self._workers,
            position=manager.data_position,
            kl=self._arguments.state_dict,
            incarnation=ctx.incarnation,
            check_alive=ctx.check_alive,
        )
        self._costs = cost_functions(config, paths, list(self._meshes))
        self._loop = self._build_loop(total_steps)

    def _model_dir(self, role: str) -> Path:
        return role_settings(self._config, role).model_dir(self._paths)

    async def _enter(self, phase: str) -> None:
        """A new phase of the run: in the step log, the heartbeat and the name store."""
        self._log.append({"kind": "phase", "phase": phase, "time": time.time()})
        self._ctx.set_state(phase)
        self._phase = phase
        await self._show({})

    async def _show(self, fields: dict[str, Any]) -> None:
        """What the status page says of the run; ``fields`` stay until they are replaced."""
        self._shown.update(fields)
        value = msgspec.json.encode({"phase": self._phase, "time": time.time(), **self._shown}).decode()
        ctx = self._ctx
        await tell(ctx.store, ctx.names.status, value, self._config.cluster.lease_s, ctx.check_alive)

    async def run(self) -> None:
        """To the end of the run, or until ``stop`` is set and what was trained is saved. Raises Fenced when another
        training side has taken over.
        """
        done = await unless(self._stop, self._start())
        if done is None:
            return
        steps = await self._loop.run(done)
        await unless(self._stop, self._conclude(steps))
        if not self.finished:  # what was done when the loop ended may not be saved, without ``checkpoint.at_end``
            await self._checkpoints.finish(stopped=True)

    async def _start(self) -> int:
        """Everything before the first step; returns the steps done. Told to stop meanwhile, it loses nothing: what it
        makes is on disk, or is made again.
        """
        # One process proves what all ranks wrote, each within the bound on a call.
        root, limit = self._paths.checkpoints, self._config.cluster.request_timeout_s * self._allocation.workers
        start = await on_disk(f"verifying {root}", limit, lambda: find_start(root, self._config.resume))
        asked = await self._roll_back(start)
        await self._enter("connect")
        await self._stream.barrier(range(self._allocation.workers), self._config.cluster.connect_timeout_s)
        waiting = self._followers(start)
        await self._initialize((role for role in self._meshes if role not in waiting), self._model_dir)
        done = await self._begin(start)
        await self._enter("publish")
        await self._publisher.publish(done, done)
        if waiting:
            await self._publisher.export(self._paths.warmed_up)
            await self._initialize(waiting, lambda role: self._paths.warmed_up)
        if not start.own and (start.checkpoint or self._config.warmup.steps):
            await self._checkpoints.first(done)
        if not has_trained(self._records()):
            await self._evaluate("before", done)
        await self._enter("train")
        for step in unanswered(self._records(), asked, done) if start.own else ():
            if self._loop.evaluation_is_due(step):
                await self._loop.start_evaluation(step, asked_at=done)
        return done

    async def _conclude(self, steps: int) -> None:
        for record in await self._evaluations.rest():
            self._log.append(record)
        await self._evaluate("after", steps)
        await self._publisher.export(self._paths.final_model)
        await self._enter("done")
        self.finished = True

    async def _roll_back(self, start: Start) -> list[str]:
        """What is later than ``start`` is undone, before anything else: from here on the manager grants nothing, and
        what was granted is issued again once the weights of ``start`` are published. Raises Fenced.

        Returns the evaluations that were ever asked for.
        """
        folder = str(start.checkpoint or "")
        request = RollBackRequest(start.step, start.step, self._ctx.incarnation, folder)
        try:
            reply = await self._manager.roll_back(request)
        except StreamError as error:  # this checkpoint and this ledger do not fit: another start would not change that
            error.permanent = True
            raise
        if any(True for _ in self._records()):
            self._log.append(recovered_record(start, self._ctx.incarnation))
            log.info("went back to version %d; %d tickets are issued again", start.step, reply.reissued)
        await self._publisher.discard_unfinished()
        return reply.evaluations

    def _records(self) -> Iterator[StepRecord]:
        """What holds of the step log."""
        return surviving_steps(self._paths.steps)

    def _followers(self, start: Start) -> list[str]:
        """Roles that start as the actor does, where that is known only after its warm-up.

        A reference loaded before would be the model that has learned nothing, and its KL a pull back to that.
        """
        if start.checkpoint or not self._config.warmup.steps:
            return []
        return [role for role in self._meshes if role_settings(self._config, role).as_actor]

    async def _initialize(self, roles: Iterable[str], directory: Callable[[str], Path]) -> None:
        """``roles`` on their meshes. All are sent before one is awaited: those on separate workers load together."""
        trained = {*self._flow.trained_roles, *([ACTOR] if self._config.warmup.steps else [])}
        training = self._ctx.incarnation
        requests = [InitializeRequest(role, str(directory(role)), role in trained, training) for role in roles]
        await asyncio.gather(*(self._workers.initialize(request) for request in requests))

    async def _begin(self, start: Start) -> int:
        """The actor as training starts with it: as a checkpoint left it, or warmed up. Returns the steps done."""
        if start.checkpoint:
            await self._enter("recover" if start.own else "resume")
            state = await self._checkpoints.load(start.checkpoint)
            self._arguments.load_state_dict(state.kl)
            return state.step
        if self._config.warmup.steps:
            await self._enter("warmup")
            await self._warm_up()
        return 0

    def _build_loop(self, total_steps: int) -> TrainLoop:
        config = self._config

        def keep(group: Sequence[SampleMeta]) -> bool:
            return keep_group([episode.correct for episode in episodes_of(group)], config.train.ppo.filter)

        intake = Intake(
            config,
            trainer_incarnation=self._ctx.incarnation,
            keep=keep,
            workers=self._workers,
            manager=self._manager,
            mend=self._publisher.mend,
        )
        self._stream.on_notice("samples_arrived", SamplesArrived, lambda notice: intake.on_samples(notice.samples))
        ctx = self._ctx
        recorder = Recorder(config, self._paths, self._meshes, self._workers, ctx.incarnation, ctx.check_alive)
        self._stream.on_notice("recorded", Recorded, recorder.written)
        plan = functools.partial(plan_roles, config, self._meshes, self._costs)
        recorded = recorder if config.record.samples else None
        return TrainLoop(
            config,
            runner=StepRunner(config, self._flow, self._meshes, plan, self._workers, recorded),
            intake=intake,
            arguments=self._arguments,
            publisher=self._publisher,
            manager=self._manager,
            evaluations=self._evaluations,
            checkpoints=self._checkpoints,
            step_log=self._log,
            show=self._show,
            hf_folder=self._paths.root / "hf",
            total_steps=total_steps,
            stop=self._stop,
        )

    async def _warm_up(self) -> None:
        config = self._config
        demos = dataset_files(config, self._paths).demos
        assert demos is not None, "the launcher has checked that there are demonstrations"
        warmup = Warmup(
            config.warmup,
            demos=len(DemoDataset(demos, self._tokenizer)),
            seed=config.seed,
            mesh=self._meshes[ACTOR],
            cost=self._costs[ACTOR],
            workers=self._workers,
            executor=GraphExecutor(dataflows.sft(config), self._meshes, self._workers),
            step_log=self._log,
        )
        await warmup.run()

    async def _evaluate(self, eval_id: str, step: int) -> None:
        """Held-out accuracy, sampled through the servers like any rollout, with the newest version; once per step."""
        problems = self._config.evaluation.problems
        if not problems or evaluated(self._records(), eval_id, step):
            return
        await self._enter("evaluate")
        self._log.append(await self._evaluations.run(eval_id, problems, step))


async def serve(ctx: WorkerContext) -> None:
    """Run the master until it is done, or told to stop: then the step under way, and a checkpoint, if that fits."""
    keys = keys_for(ctx.config.cluster.host, ctx.paths.root / "keys")
    stream = MasterStream(ctx.config.cluster.host, keys=keys, check_alive=ctx.check_alive)
    ctx.count(lambda: {"bad_messages": stream.bad_messages, "rejected_peers": stream.rejected})
    ctx.register(ctx.names.request_reply(training_start()), stream.address)
    step_log = StepLog(ctx.paths.steps, ctx.check_alive)
    config, names = ctx.config, ctx.names
    client = ManagerClient(
        lambda: ctx.store.wait(names.gserver_manager, config.cluster.connect_timeout_s, "the gserver_manager"),
        ctx.token,
        check_alive=ctx.check_alive,
    )
    try:
        master = Master(ctx, stream, client, step_log, stop_event(ctx))
        await run_until_stopped(ctx, master.run(), _GRACE * config.cluster.master_stop_s)
    finally:
        await client.close()
        stream.close()
        step_log.close()
    if not master.finished:
        sys.exit(EXIT_STOPPED)


def main() -> None:
    worker_main("master_worker", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
