"""The training service in the MasterWorker (``train.loop=serve``): tenants on the ranks, samples on the servers.

    Service ──> RankTrainer     switches the ranks to the tenant of a call, and runs it there
            ──> ServerSampler   sends a prompt to the server with the fewest completions of the service

The ranks keep the state of every tenant in host memory. A tenant's weights go to the servers as versions of the weight
transport, which the servers load for single requests: the version in training stays that of the base model.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from realsys.algorithm.balance import CostFunction
from realsys.algorithm.minibatches import plan_minibatches, sequence_refs
from realsys.algorithm.sequence_buffer import owners_of
from realsys.cluster.aio import on_disk, run_beside
from realsys.cluster.lease import CheckAlive
from realsys.cluster.topology import Mesh
from realsys.cluster.worker import WorkerContext
from realsys.config.allocation import ACTOR
from realsys.config.dataflow import Dataflow
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.errors import GenerationError
from realsys.generation.client import GenerationClient, SamplingSpec
from realsys.generation.completion import Completion
from realsys.generation.protocol import AdapterWeights
from realsys.manager.client import ManagerClient
from realsys.manager.messages import DataPosition
from realsys.model_calls import ReadRequest
from realsys.model_files.config_json import read_model
from realsys.serve.contract import Adam, CallRefused, ClientRow, Passed, Sampled, Sampling, Snapshot
from realsys.serve.routes import serve as serve_http
from realsys.serve.service import Service, ServiceSettings
from realsys.serve.settings import read_settings
from realsys.train.checkpoint import checkpoint_files as files
from realsys.train.checkpoint.checkpoint_files import CHECKPOINT, CheckpointState
from realsys.train.master.checkpoints import commit, describe_role
from realsys.train.master.executor import GraphExecutor, Ownership
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.publish import Publisher
from realsys.train.requests import (
    ClientRows,
    FinishCheckpointRequest,
    LoadTenantRequest,
    SaveCheckpointRequest,
    StepTenantRequest,
    SwitchTenantRequest,
)

if TYPE_CHECKING:
    from realsys.train.master.run import MasterParts

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # seconds for which the list of servers is good
_SHOW_S = 2.0  # seconds between two looks at what the status page shows
_PATIENCE_S = 300.0  # wait of a sample for a server that can serve it


class RankTrainer:
    """The ``Trainer`` of the service, on the ranks of the actor."""

    def __init__(
        self,
        config: Config,
        paths: TrialPaths,
        flow: Dataflow,
        mesh: Mesh,
        cost: CostFunction,
        workers: ModelWorkers,
        publisher: Publisher,
        *,
        incarnation: str,
        check_alive: CheckAlive,
    ) -> None:
        """``flow``: the dataflow of the service, with one call."""
        self._config, self._paths = config, paths
        self._mesh, self._cost = mesh, cost
        self._workers, self._publisher = workers, publisher
        self._flow = flow
        self._executor = GraphExecutor(flow, {ACTOR: mesh}, workers)
        self._incarnation, self._check_alive = incarnation, check_alive
        self._current = ""

    async def start(self, tenant: str, seed: int, checkpoint: Path | None = None) -> None:
        await self._workers.switch_tenant(SwitchTenantRequest(ACTOR, tenant, seed, drop=[tenant]))
        self._current = tenant
        if checkpoint is not None:
            await self.load(tenant, checkpoint, optimizer=True)

    async def forward_backward(
        self, tenant: str, rows: Sequence[ClientRow], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Passed:
        await self._switch(tenant)
        # Rows without a loss token have nothing to compute.
        computed = {f"{number:08d}": row for number, row in enumerate(rows) if row.loss_mask.any()}
        logprobs = [np.zeros(0, np.float32) for _ in rows]
        if not computed:
            return Passed(logprobs, {"loss:sum": 0.0})
        groups = await self._loaded(computed)
        ownership = Ownership()
        ownership.add_owners(self._flow.source_keys, owners_of(groups))
        plan = await asyncio.to_thread(self._plan, groups)
        [call] = self._flow.calls
        args = {call.name: {"loss": loss, "config": dict(config), "backward": backward}}
        results = await self._executor.run({ACTOR: plan}, ownership, step=1, version=0, args=args)
        [key] = call.outputs
        places: dict[int, list[str]] = {}
        for name in computed:
            places.setdefault(min(ownership.owners[key][name]), []).append(name)
        reads = [self._workers.read(worker, ReadRequest(own, [key])) for worker, own in places.items()]
        for own, reply in zip(places.values(), await asyncio.gather(*reads), strict=True):
            for name, [values] in zip(own, reply.arrays, strict=True):
                logprobs[int(name)] = np.array(values, np.float32)
        await self._workers.clear(ownership.discard_samples(list(computed)))
        stats = results[call.name].stats
        return Passed(logprobs, {f"{name.removesuffix('_sum')}:sum": stats[name] for name in stats if "_sum" in name})

    async def step(self, tenant: str, adam: Adam) -> dict[str, float]:
        await self._switch(tenant)
        request = StepTenantRequest(
            ACTOR, adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm
        )
        reply = (await self._workers.step_tenant(request))[0]
        if not math.isfinite(reply.grad_norm):
            raise CallRefused("the gradient is not finite: no step was taken, and the gradient is zero again")
        return {"grad_norm:mean": reply.grad_norm, "steps:sum": float(reply.applied)}

    async def save(self, tenant: str, folder: Path) -> None:
        await self._switch(tenant)
        # The name has the incarnation: a rank of an earlier trainer must not write among the files of this one.
        tmp = folder.with_name(f"{folder.name}.{self._incarnation}.tmp")
        self._check_alive()

        def prepare() -> None:
            for left in folder.parent.glob("*.tmp"):  # by a trainer that was killed
                shutil.rmtree(left)
            CHECKPOINT.prepare(tmp)

        await self._on_disk(folder, prepare)
        await self._workers.save_checkpoint(SaveCheckpointRequest(ACTOR, 0, str(tmp)))
        await self._workers.finish_checkpoint(FinishCheckpointRequest(ACTOR, 0))
        layout = self._mesh.layout
        stems = [files.rank_stem(ACTOR, rank, layout.world_size) for rank in range(layout.world_size)]
        role = await asyncio.to_thread(describe_role, self._config, self._paths, ACTOR, str(layout))
        state = CheckpointState(
            step=0,
            version=0,
            seed=self._config.seed,
            batch_groups=1,
            position=DataPosition(0, [], 1, self._config.seed),
            roles={ACTOR: role},
            kl={},
            config_digest="",
            time=time.time(),
        )
        await self._on_disk(folder, lambda: commit(tmp, state, stems, self._check_alive, folder))

    async def load(self, tenant: str, folder: Path, *, optimizer: bool) -> None:
        await self._switch(tenant)
        await self._workers.load_tenant(LoadTenantRequest(ACTOR, str(folder), optimizer))

    async def snapshot(self, tenant: str) -> Snapshot:
        await self._switch(tenant)
        version, locator = await self._publisher.snapshot()
        return Snapshot(f"{tenant}/{version}", version, locator)

    async def keep(self, snapshots: Sequence[Snapshot]) -> None:
        await self._publisher.keep_snapshots([snapshot.locator for snapshot in snapshots])

    async def drop(self, tenant: str) -> None:
        other = "" if self._current == tenant else self._current
        await self._workers.switch_tenant(SwitchTenantRequest(ACTOR, other, drop=[tenant]))
        self._current = other

    async def _switch(self, tenant: str) -> None:
        if tenant != self._current:
            await self._workers.switch_tenant(SwitchTenantRequest(ACTOR, tenant))
            self._current = tenant

    async def _loaded(self, rows: Mapping[str, ClientRow]) -> list[list[Any]]:
        """Put rows on the DP heads, an equal share on each; return their metadata, a group of each head.

        The rows of a group share what they begin with, such as the prompt of several completions.
        """
        heads = self._mesh.dp_heads()
        loads = []
        for number, head in enumerate(heads):
            own = dict(itertools.islice(rows.items(), number, None, len(heads)))
            if own:
                columns = ("tokens", "loss_mask", "logprobs", "advantages")
                arrays = [{name: getattr(row, key).tobytes() for name, row in own.items()} for key in columns]
                loads.append(self._workers.add_rows(head, ClientRows(*arrays)))
        return [reply.samples for reply in await asyncio.gather(*loads)]

    def _plan(self, groups: list[list[Any]]) -> Any:
        capacity = self._config.train.microbatch_tokens
        return plan_minibatches(sequence_refs(groups), 1, self._mesh.layout.data, self._cost, capacity=capacity)

    async def _on_disk(self, folder: Path, work: Any) -> Any:
        return await on_disk(f"checkpoint in {folder}", self._config.cluster.request_timeout_s, work)


class ServerSampler:
    """The ``Sampler`` of the service, on the generation servers that the manager knows."""

    def __init__(self, manager: ManagerClient, client: GenerationClient) -> None:
        self._manager, self._client = manager, client
        self._servers: list[str] = []  # URLs
        self._looked = -math.inf
        self._running: Counter[str] = Counter()  # completions by URL

    async def sample(self, snapshot: Snapshot | None, prompt: Sequence[int], sampling: Sampling) -> list[Sampled]:
        adapter = None if snapshot is None else AdapterWeights(snapshot.key, snapshot.version, snapshot.locator)
        spec = SamplingSpec(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_tokens,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            n=sampling.n,
            top_logprobs_num=sampling.top_logprobs,
        )
        if problem := spec.problem():
            raise CallRefused(problem)
        seed = secrets.randbits(31) if sampling.seed is None else sampling.seed & 0x7FFFFFFF
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            url = await self._choose()
            self._running[url] += sampling.n
            try:
                rid = secrets.token_hex(16)
                completions = await self._client.generate(url, prompt, spec, rid=rid, seed=seed, adapter=adapter)
                if any(completion.finish_reason == "abort" for completion in completions):
                    raise GenerationError(f"{url} was told to end its requests", retryable=True)
                return [_sampled(completion) for completion in completions]
            except GenerationError as error:
                if not error.retryable:
                    raise CallRefused(str(error)) from None
                if time.monotonic() > deadline:
                    raise
                if url in self._servers:  # by the first of its samples that fails; until the next look
                    log.warning("%s; trying again", error)
                    self._servers.remove(url)
                await asyncio.sleep(_LOOK_S)
            finally:
                self._running[url] -= sampling.n

    async def _choose(self) -> str:
        """Return the server with the fewest completions, of those that have not failed since the last look."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            if time.monotonic() - self._looked > _LOOK_S:
                self._looked = time.monotonic()
                servers = (await self._manager.status())["servers"]
                self._servers = [server["url"] for server in servers if server["state"] == "ready"]
            if self._servers:
                return min(self._servers, key=lambda url: self._running[url])
            if time.monotonic() > deadline:
                raise GenerationError(f"waited {_PATIENCE_S:g} s for a generation server")
            await asyncio.sleep(_LOOK_S)


def _sampled(completion: Completion) -> Sampled:
    stopped = completion.finish_reason == "stop"
    return Sampled(completion.tokens.tolist(), completion.logprobs.tolist(), stopped, completion.top)


# ---- the loop of `realsys serve`


async def serve(parts: MasterParts, ctx: WorkerContext, stop: asyncio.Event) -> None:
    """Serve clients until ``stop`` is set. What they have done is in the journals of their models."""
    config, stored = ctx.config, read_settings(ctx.paths.serve)
    model = read_model(ctx.paths.base_model(config))
    targets = set(config.train.lora.targets)
    settings = ServiceSettings(
        base_model=stored.model_name,
        lora_rank=config.train.lora.rank,
        vocab=model.vocab,
        longest=min(longest_sequence(config), config.train.microbatch_tokens),
        attn={"qkv", "proj"} <= targets,
        mlp={"gate_up", "down"} <= targets,
        checkpoint_every=stored.checkpoint_every,
        owners=tuple(msgspec.structs.replace(owner, name=name) for name, owner in stored.owners.items()),
    )
    trainer = RankTrainer(
        config,
        ctx.paths,
        parts.flow,
        parts.meshes[ACTOR],
        parts.costs[ACTOR],
        parts.workers,
        parts.publisher,
        incarnation=ctx.incarnation,
        check_alive=ctx.check_alive,
    )
    client = GenerationClient.of(config.generation, ctx.token, ctx.check_alive)
    service = Service(trainer, ServerSampler(parts.connections.manager, client), settings, ctx.paths.clients)
    await service.open()
    ready = asyncio.get_running_loop().create_future()

    async def show() -> None:
        """Put the models of the clients on the status page whenever they have changed."""
        shown: dict[str, Any] = {}
        while True:
            status = {"url": await asyncio.shield(ready), **service.status()}
            if status != shown:
                shown = status
                await parts.status.show({"serve": status})
            await asyncio.sleep(_SHOW_S)

    serving = serve_http(
        service, config.cluster.host, stored.port, on_ready=ready.set_result, check_alive=ctx.check_alive
    )
    try:
        await run_beside(stop.wait(), run_beside(serving, show()))
    finally:
        service.close()
        await client.close()
