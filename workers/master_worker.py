"""The MasterWorker process: connects the ModelWorkers, runs warm-up, training and evaluation, exports the result."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from realsys.cluster.aio import run_until_stopped
from realsys.cluster.topology import Mesh, routing_table, whole_mesh
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.config.allocation import parse_allocation
from realsys.data.demos import DemoDataset
from realsys.data.files import dataset_files
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.master.evaluation import Evaluations
from realsys.master.executor import GraphExecutor
from realsys.master.graph import ppo_dataflow, sft_dataflow
from realsys.master.loop import TrainLoop, planned_steps
from realsys.master.publish import Publisher
from realsys.master.step_log import StepLog
from realsys.master.warmup import Warmup
from realsys.master.workers import ModelWorkers
from realsys.rollout.manager_client import ManagerClient
from realsys.stream.request_reply import MasterStream
from realsys.stream.routing import RoutedStream
from realsys.stream.security import keys_for
from realsys.types import SamplesArrived
from realsys.weights.manifest import export_copy


class Master:
    """Builds the parts in their order and runs the phases."""

    def __init__(self, ctx: WorkerContext, stream: MasterStream, manager: ManagerClient, step_log: StepLog) -> None:
        config, paths = ctx.config, ctx.paths
        self._ctx, self._config, self._paths, self._manager, self._log = ctx, config, paths, manager, step_log
        self._stream = stream
        self._phase, self._shown = "start", dict[str, Any]()
        self._model_dir = Path(config.model.path) if config.model.path else paths.model
        self._mesh: Mesh = whole_mesh(parse_allocation(config.allocation).training)
        routed = RoutedStream(stream, routing_table({"actor": self._mesh}))
        self._workers = ModelWorkers(routed, self._mesh, config.cluster.request_timeout_s)
        self._evaluations = Evaluations(manager, seed=config.seed, timeout_s=config.cluster.request_timeout_s)
        self._publisher = Publisher(
            store=ctx.store,
            key=ctx.names.model_version(),
            root=paths.weights(),
            model_dir=self._model_dir,
            incarnation=ctx.incarnation,
            keep=config.train.keep_versions,
            save=self._workers.save_weights,
        )

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
        await asyncio.to_thread(self._ctx.store.add, self._ctx.names.status, value, replace=True)

    async def run(self) -> None:
        config = self._config
        loop = self._build_loop()
        await self._enter("connect")
        await self._stream.barrier(list(self._mesh.workers), config.cluster.connect_timeout_s)
        await self._workers.initialize(str(self._model_dir))
        if config.warmup.steps:
            await self._enter("warmup")
            await self._warm_up()
        await self._enter("publish")
        await self._publisher.publish(0, 0)
        await self._evaluate("before", 0)
        await self._enter("train")
        steps = await loop.run()
        await self._evaluate("after", steps)
        newest = self._publisher.newest
        assert newest is not None
        await asyncio.to_thread(export_copy, Path(newest.path), self._paths.final_model)
        await self._enter("done")

    def _build_loop(self) -> TrainLoop:
        config = self._config
        tokenizer = TextTokenizer(self._model_dir)
        prompts = PromptDataset(config, self._paths, tokenizer)
        flow = ppo_dataflow(decoupled=config.train.ppo.use_decoupled_loss)
        loop = TrainLoop(
            config,
            mesh=self._mesh,
            workers=self._workers,
            executor=GraphExecutor(flow, {"actor": self._mesh}, self._workers.run_mfc),
            publisher=self._publisher,
            manager=self._manager,
            evaluations=self._evaluations,
            step_log=self._log,
            show=self._show,
            total_steps=planned_steps(config, prompts.size("train")),
        )
        self._stream.on_notice("samples_arrived", SamplesArrived, lambda notice: loop.on_samples(notice.samples))
        return loop

    async def _warm_up(self) -> None:
        config = self._config
        demos = dataset_files(config, self._paths).demos
        assert demos is not None, "the launcher has checked that there are demonstrations"
        warmup = Warmup(
            config.warmup,
            demos=len(DemoDataset(demos, TextTokenizer(self._model_dir))),
            seed=config.seed,
            mesh=self._mesh,
            workers=self._workers,
            executor=GraphExecutor(sft_dataflow(), {"actor": self._mesh}, self._workers.run_mfc),
            step_log=self._log,
        )
        await warmup.run()

    async def _evaluate(self, eval_id: str, step: int) -> None:
        """Held-out accuracy, sampled through the servers like any rollout, with the newest version."""
        problems = self._config.evaluation.problems
        if not problems:
            return
        await self._enter("evaluate")
        self._log.append(await self._evaluations.run(eval_id, problems, step))


async def serve(ctx: WorkerContext) -> None:
    """Run the master until it is done or told to stop."""
    keys = keys_for(ctx.config.cluster.host, ctx.paths.root / "keys")
    stream = MasterStream(ctx.config.cluster.host, keys=keys)
    ctx.register(ctx.names.request_reply, stream.address)
    step_log = StepLog(ctx.paths.steps)
    config, names = ctx.config, ctx.names
    client = ManagerClient(
        lambda: ctx.store.wait(names.gserver_manager, config.cluster.connect_timeout_s, "the gserver_manager"),
        ctx.token,
    )
    try:
        await run_until_stopped(ctx, Master(ctx, stream, client, step_log).run())
    finally:
        await client.close()
        stream.close()
        step_log.close()


def main() -> None:
    worker_main("master_worker", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
