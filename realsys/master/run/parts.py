"""Builds the parts of a MasterWorker from the configuration.

    connections ──> ModelWorkers ──> publisher, checkpoints ──> intake, evaluations ──> TrainLoop

The phases that use the parts are in ``realsys.master.run.phases``.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from realsys.algorithm import dataflows
from realsys.algorithm.batch.balance import CostFunction
from realsys.cluster.stream.master_stream import MasterStream, RoutedStream
from realsys.cluster.topology import Mesh, place, routing_table
from realsys.cluster.worker import WorkerContext
from realsys.config.allocation import ACTOR, parse_allocation
from realsys.config.dataflow import Dataflow, dataflow_of, saved_roles
from realsys.config.paths import TrialPaths
from realsys.config.roles import role_settings
from realsys.config.schema import Config
from realsys.data.dataset_files import dataset_files
from realsys.data.demos import DemoDataset
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.manager.client import ManagerClient
from realsys.master.calls.call_arguments import CallArguments
from realsys.master.calls.executor import GraphExecutor
from realsys.master.calls.model_workers import ModelWorkers
from realsys.master.calls.plans import cost_functions, plan_roles
from realsys.master.checkpoints import Checkpoints, CheckpointSources
from realsys.master.evaluation import Evaluations, ResultWriter
from realsys.master.intake import Intake
from realsys.master.intake_state import IntakeSettings, IntakeState
from realsys.master.loop import LoopParts, TrainLoop, planned_steps
from realsys.master.publish import Publisher, VersionKey
from realsys.master.records.recorder import Recorder
from realsys.master.run.run_status import RunStatus
from realsys.master.run.stopping import Stopping
from realsys.master.step import StepRunner
from realsys.master.step_log import StepLog
from realsys.master.warmup import Warmup, WarmupParts
from realsys.model_calls import SamplesArrived
from realsys.train.records.record_messages import Recorded
from realsys.weights.base import PublisherParts
from realsys.weights.build import build as build_transport


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
    world_size   number of ModelWorkers
    meshes       role -> its mesh
    costs        role -> cost of one of its sequences
    """

    connections: Connections
    status: RunStatus
    total_steps: int
    world_size: int
    flow: Dataflow
    meshes: Mapping[str, Mesh]
    costs: Mapping[str, CostFunction]
    tokenizer: TextTokenizer
    workers: ModelWorkers
    arguments: CallArguments
    publisher: Publisher
    evaluations: Evaluations
    checkpoints: Checkpoints


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
    total_steps = planned_steps(config, PromptDataset(config, paths, tokenizer).size("train"))
    stream = RoutedStream(connections.stream, routing_table(meshes))
    workers = ModelWorkers(stream, meshes, config.cluster.request_timeout_s)
    arguments = CallArguments(config, flow, total_steps)
    publisher = _build_publisher(ctx, workers)
    return MasterParts(
        connections=connections,
        status=RunStatus(ctx, connections.step_log),
        total_steps=total_steps,
        world_size=allocation.workers,
        flow=flow,
        meshes=meshes,
        costs=cost_functions(config, paths, list(meshes)),
        tokenizer=tokenizer,
        workers=workers,
        arguments=arguments,
        publisher=publisher,
        evaluations=Evaluations(
            connections.manager,
            trainer_incarnation=ctx.incarnation,
            config=config,
            repair=publisher.repair,
            writer=ResultWriter(config, paths.evaluations),
        ),
        checkpoints=Checkpoints(
            config,
            paths,
            CheckpointSources(
                meshes={role: meshes[role] for role in saved_roles(config, flow)},
                workers=workers,
                position=connections.manager.data_position,
                kl=arguments.state_dict,
            ),
            incarnation=ctx.incarnation,
            check_alive=ctx.check_alive,
        ),
    )


def _build_publisher(ctx: WorkerContext, workers: ModelWorkers) -> Publisher:
    config, paths = ctx.config, ctx.paths
    parts = PublisherParts(paths.weights(), model_dir(config, paths, ACTOR), ctx.incarnation, ctx.check_alive)
    return Publisher(
        build_transport(config).publisher(parts),
        workers,
        VersionKey(ctx.store, ctx.names.model_version(), config.cluster.lease_s, ctx.check_alive),
        incarnation=ctx.incarnation,
        transport=config.weights.transport,
        timeout_s=config.cluster.request_timeout_s,
    )


def build_loop(ctx: WorkerContext, parts: MasterParts, stop: asyncio.Event) -> TrainLoop:
    """Build the train loop, and connect it to the notices of the ModelWorkers."""
    config, stream = ctx.config, parts.connections.stream
    decisions = IntakeState(IntakeSettings.of(config), ctx.incarnation)
    intake = Intake(decisions, parts.workers, parts.connections.manager, parts.publisher.repair)
    stream.on_notice("samples_arrived", SamplesArrived, lambda notice: intake.on_samples(notice.samples))
    recorder = Recorder(config, ctx.paths, parts.meshes, parts.workers, ctx.incarnation, ctx.check_alive)
    stream.on_notice("recorded", Recorded, recorder.written)
    plan = functools.partial(plan_roles, config, parts.meshes, parts.costs)
    recorder_in_use = recorder if config.record.samples else None
    return TrainLoop(
        config,
        LoopParts(
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
        ),
        hf_folder=ctx.paths.root / "hf",
        total_steps=parts.total_steps,
        stop=stop,
    )


def build_warmup(ctx: WorkerContext, parts: MasterParts) -> Warmup:
    """Build the supervised warm-up of the actor."""
    config = ctx.config
    demos = dataset_files(config, ctx.paths).demos
    assert demos is not None, "the launcher has checked that there are demonstrations"
    warmup_parts = WarmupParts(
        mesh=parts.meshes[ACTOR],
        cost=parts.costs[ACTOR],
        workers=parts.workers,
        executor=GraphExecutor(dataflows.sft(config), parts.meshes, parts.workers),
        step_log=parts.connections.step_log,
    )
    return Warmup(config.warmup, warmup_parts, demos=len(DemoDataset(demos, parts.tokenizer)), seed=config.seed)
