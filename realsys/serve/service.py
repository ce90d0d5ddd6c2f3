"""The training service: sessions, tenants, futures, turns. HTTP is in ``routes``, messages are in ``wire``.

    accept: journal, fsync, acknowledge ──> waiting, by seq_id ──turn──> Trainer ──> journal, fsync ──> retrieve

Rules, each with its name:

order       the calls of a tenant are carried out in the order of seq_id, whatever order they arrive in
once        a call is carried out once: a repeated request gets the same future, before and after a restart
turns       tenants take turns, one call each
own         a key sees its own sessions, models and weights only
blameless   a call that ends the process RESTARTS + 1 times fails for its tenant alone, and the service goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import hmac
import logging
import math
import re
import secrets
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from realsys.cluster.http_server import RefusedRequest
from realsys.errors import GenerationError
from realsys.serve import wire
from realsys.serve.contract import Adam, CallRefused, Sampler, Snapshot, Trainer
from realsys.serve.journal import (
    Answered,
    Began,
    Called,
    Checkpoint,
    Interrupted,
    Named,
    Opened,
    Record,
    TenantJournal,
    Unloaded,
)
from realsys.serve.settings import Owner
from realsys.serve.tenant import SNAPSHOTS, Tenant, seed_of

log = logging.getLogger(__name__)

HELD_S = 20.0  # a future is asked for again after this time; the SDK waits 45 s
RESTARTS = 2  # of the process at the same call
_FETCHED_S, _KEPT_S = 60.0, 900.0  # times that a sample is kept after it was fetched, and if it never is
_SHOWN = 64  # models on the status page
_OWNER_BYTES = 256 << 20  # of an owner's requests that arrive at a time, and of a model's calls that wait
_AHEAD = 100_000  # calls that may be missing before one
_SILENT_S = 60.0  # without a heartbeat of its session, a model makes room for another one of its owner
_HEARTBEAT_S = 12.0  # the SDK sends one every 10 s
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class ServiceSettings(msgspec.Struct, frozen=True):
    """What is served, and to whom.

    longest           tokens of a row, and of a prompt with its completion
    tokenizer         name or folder that clients load it from; empty: derived from ``base_model``
    attn, mlp         layers that have adapters
    checkpoint_every  optimizer steps of a tenant: a restart repeats fewer
    missing_s         time that later calls wait for one that has not arrived
    owners            empty: every key is accepted, and the server must be on loopback
    """

    base_model: str
    lora_rank: int
    vocab: int
    longest: int
    tokenizer: str = ""
    attn: bool = True
    mlp: bool = True
    checkpoint_every: int = 10
    missing_s: float = 120.0
    owners: tuple[Owner, ...] = ()


class Service:
    """All sessions and tenants. ``run`` carries out the calls that the other methods accept."""

    def __init__(self, trainer: Trainer, sampler: Sampler, settings: ServiceSettings, folder: Path) -> None:
        wire.messages()  # raises at the start, not at the first call
        self.settings = settings
        self.tenants: dict[str, Tenant] = {}
        self._trainer = trainer
        self._sampler = sampler
        self._folder = folder
        self._sessions: dict[str, str] = {}  # session -> owner
        self._began = time.monotonic()
        self._arriving: Counter[str] = Counter()  # owner -> bytes of requests that are being answered
        self._heard: dict[str, float] = {}  # session -> time of its last heartbeat
        self._samplers: dict[str, str] = {}  # sampling session -> path of weights, model, or "" for the base model
        self._samples: dict[str, tuple[str, asyncio.Task[Answered]]] = {}  # request -> owner, result
        self._sampling: dict[str, Snapshot] = {}  # request -> weights that are being sampled from
        self._turns: deque[Tenant] = deque()
        self._work = asyncio.Event()
        self._trash: list[Path] = []
        self._keep_due = True
        self._error: BaseException | None = None
        self._stopping = False

    # ---- start and end

    async def open(self) -> None:
        """Read the journals of ``folder``. Raises LedgerError for a damaged one."""
        self._journal = TenantJournal(self._folder / "sessions" / "journal")
        for record in self._journal.replay():
            if isinstance(record, Opened) and record.path is None:
                self._sessions[record.id] = record.owner
            elif isinstance(record, Opened):
                self._samplers[record.id] = record.path or ""
        for path in sorted(self._folder.glob("*-train-*/journal")):
            self._add(":train:".join(path.parent.name.split("-train-")))

    async def run(self) -> None:
        """Carry out calls until ``stop``, or until one ends the process: raises its exception, or the journal's."""
        while not self._stopping:
            if self._error is not None:
                raise self._error
            if self._trash or self._keep_due:
                await self._clean()
            elif (tenant := self._turn()) is not None:
                if tenant.unloaded:
                    await self._drop(tenant)
                elif tenant.next in tenant.waiting:
                    await self._carry_out(tenant, tenant.waiting[tenant.next])
                else:
                    await self._answer_all(
                        tenant, f"call {tenant.next} of {tenant.id}, which comes before, has not arrived"
                    )
            else:
                self._work.clear()
                waits = any(each.gap_since is not None for each in self._turns)
                await _wait(self._work, min(1.0, self.settings.missing_s) if waits else None)

    def stop(self) -> None:
        """End ``run`` after the call that is being carried out."""
        self._stopping = True
        self._work.set()

    def close(self) -> None:
        """End samples and close the journals. ``run`` must have ended."""
        for _, task in self._samples.values():
            task.cancel()
        for journal in (self._journal, *(tenant.journal for tenant in self.tenants.values())):
            journal.close()

    def _add(self, model_id: str) -> Tenant:
        tenant = Tenant(model_id, self._sessions[model_id.partition(":")[0]], self._folder)
        self.tenants[model_id] = tenant
        needed = {named.folder for named in tenant.names.values()} | {getattr(tenant.checkpoint, "folder", "")}
        self._trash += [each for each in tenant.folder.iterdir() if each.is_dir() and each.name not in needed]
        if tenant.dropped:
            tenant.journal.close()
        else:
            self._turns.append(tenant)
        self._samplers |= {name: model_id for name in tenant.names if not name.startswith("tinker:")}
        return tenant

    def _turn(self) -> Tenant | None:
        """Return the tenant whose turn it is, and give the next turn to the one after it (turns)."""
        for _ in range(len(self._turns)):
            tenant = self._turns[0]
            self._turns.rotate(-1)
            if tenant.unloaded or tenant.next in tenant.waiting:
                tenant.gap_since = None
                return tenant
            if not tenant.waiting:
                tenant.gap_since = None
                continue
            tenant.gap_since = time.monotonic() if tenant.gap_since is None else tenant.gap_since
            if time.monotonic() - tenant.gap_since >= self.settings.missing_s:
                return tenant
        return None

    # ---- one call of a tenant

    async def _carry_out(self, tenant: Tenant, call: Called) -> None:
        """Carry out the next call of a tenant, and record its result."""
        records: list[Record] = []
        try:
            if tenant.restores > RESTARTS:
                raise _Broken(f"the state of {tenant.id} cannot be restored: the service ended while it tried")
            if tenant.tries > RESTARTS:
                raise _Broken(f"the service ended {tenant.tries} times in this call, so it was not tried again")
            if not tenant.loaded and call.seq > 0:
                tenant.journal.append(Began(call.seq, restoring=True))
                await self._restore(tenant)
            tenant.journal.append(Began(call.seq, restoring=False))
            records = await self._perform(tenant, call)
        except CallRefused as error:
            records = [Answered(call.seq, wire.failed(str(error), "user"), "user")]
        except _Broken as error:
            log.error("tenant %s: call %d (%s): %s", tenant.id, call.seq, call.kind, error)
            records = [Answered(call.seq, wire.failed(str(error), "server"), "server")]
        except asyncio.CancelledError:
            tenant.journal.append(Interrupted())
            raise
        if call.seq == 0 and any(isinstance(each, Answered) and each.error for each in records):
            records.append(Unloaded())  # there is no model
        await self._record(tenant, *records)
        due = tenant.since_checkpoint >= self.settings.checkpoint_every or tenant.journal.is_large
        if due and tenant.loaded and not tenant.has_gradients:
            await self._record(tenant, await self._save(tenant, call.seq))

    async def _record(self, tenant: Tenant, *records: Record) -> None:
        """Write records, and then let clients see them."""
        if not records:
            return
        tenant.journal.append(*records)
        await tenant.journal.synced()
        for record in records:
            match record:
                case Answered():
                    if record.named is not None:
                        self._name(tenant, record.named)
                    tenant.answer(record)
                case Named():
                    self._name(tenant, record)
                case Unloaded():
                    tenant.unloaded = True
                case Checkpoint():
                    if tenant.checkpoint is not None:
                        self._trash.append(tenant.folder / tenant.checkpoint.folder)
                    tenant.checkpoint, tenant.since_checkpoint = record, 0
                    tenant.forget_results()
                    await tenant.journal.compact(tenant.state())

    def _name(self, tenant: Tenant, named: Named) -> None:
        """Give weights their name; those that had it are removed."""
        before = tenant.names.get(named.name, named)
        if before.folder and before is not named:
            self._trash.append(tenant.folder / before.folder)
        tenant.name_weights(named)
        self._keep_due |= named.snapshot is not before.snapshot or named.snapshot is not None
        if not named.name.startswith("tinker:"):
            self._samplers[named.name] = tenant.id

    async def _perform(self, tenant: Tenant, call: Called) -> list[Record]:
        """Carry out a call. Returns its records, the result among them. Raises CallRefused."""
        trainer, name = self._trainer, tenant.name
        named: Named | None = None
        reply: dict[str, object] = {"type": call.kind}
        match call.kind:
            case "create_model":
                await trainer.start(name, tenant.seed)
                tenant.loaded = True
                reply["model_id"] = tenant.id
            case "forward" | "forward_backward":
                payload = await self._pass(tenant, call)
                return [Answered(call.seq, payload, proto=True)]
            case "optim_step":
                reply["metrics"] = await trainer.step(name, _adam(call.payload))
            case "save_weights":
                request = msgspec.json.decode(call.payload, type=wire.SaveWeights)
                path = f"tinker://{tenant.id}/weights/{_name(request.path, call.seq)}"
                if path in tenant.names and not request.overwrite:
                    raise CallRefused(f"{path} exists: choose another name, or pass overwrite=True")
                folder = await self._fresh(tenant, f"weights-{call.seq}")
                await trainer.save(name, folder)
                named = Named(path, folder=folder.name, time=time.time())
                reply["path"] = path
            case "save_weights_for_sampler":
                named = await self._publish(tenant, call.seq, call.payload, reply)
            case "load_weights":
                await self._load(tenant, msgspec.json.decode(call.payload, type=wire.LoadWeights), first=call.seq == 0)
                reply |= {"path": msgspec.json.decode(call.payload)["path"], "model_id": tenant.id}
                return [Answered(call.seq, msgspec.json.encode(reply)), await self._save(tenant, call.seq)]
        return [Answered(call.seq, msgspec.json.encode(reply), named=named)]

    async def _pass(self, tenant: Tenant, call: Called) -> bytes:
        """Compute log-probs and, unless the call is ``forward``, gradients. Returns the encoded reply."""
        limits, owner = self.settings, self._owners.get(tenant.owner, Owner("", name=tenant.owner))

        def parse() -> tuple[list[Any], str, dict[str, float]]:
            message = wire.forward_backward_request(call.payload)
            config = wire.loss_config(message)
            return (
                wire.client_rows(message, limits.vocab, limits.longest, owner.tokens_per_call),
                message.loss_fn,
                config,
            )

        rows, loss, config = await asyncio.to_thread(parse)
        passed = await self._trainer.forward_backward(
            tenant.name, rows, loss, config, backward=call.kind == "forward_backward"
        )
        tenant.tokens += sum(len(row.tokens) for row in rows)
        return await asyncio.to_thread(wire.forward_backward_output, rows, passed)

    async def _publish(self, tenant: Tenant, seq: int, payload: bytes, reply: dict[str, object]) -> Named:
        """Write the weights for the servers, for a named path or a new sampling session."""
        request = msgspec.json.decode(payload, type=wire.SaveForSampler)
        if request.kind not in ("snapshot", "inflight"):
            raise CallRefused(f"kind {request.kind!r} must be snapshot or inflight")
        if request.path is not None:
            key, name = "path", f"tinker://{tenant.id}/sampler_weights/{_name(request.path, seq)}"
        else:
            session = tenant.id.partition(":")[0]
            key, name = "sampling_session_id", f"{session}:sample:{request.sampling_session_seq_id or 0}"
            if name in self._samplers:
                raise CallRefused(f"the sampling session {name} exists")
        reply[key] = name
        inflight = request.kind == "inflight" and request.path is None
        return Named(name, snapshot=await self._trainer.snapshot(tenant.name), inflight=inflight, time=time.time())

    async def _load(self, tenant: Tenant, request: wire.LoadWeights, *, first: bool) -> None:
        folder = self._saved(tenant.owner, request.path)
        if not first:
            await self._trainer.load(tenant.name, folder, optimizer=request.optimizer)
            return
        await self._trainer.start(tenant.name, request.seed, folder if request.optimizer else None)
        if not request.optimizer:
            await self._trainer.load(tenant.name, folder, optimizer=False)
        tenant.loaded = True

    async def _save(self, tenant: Tenant, seq: int) -> Checkpoint:
        folder = await self._fresh(tenant, f"state-{seq}")
        await self._trainer.save(tenant.name, folder)
        return Checkpoint(seq, folder.name)

    async def _fresh(self, tenant: Tenant, name: str) -> Path:
        """Return a folder that does not exist: one that a killed process left is removed."""
        folder = tenant.folder / name
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return folder

    async def _restore(self, tenant: Tenant) -> None:
        """Give the ranks the state of a tenant after its last answered call."""
        checkpoint = tenant.folder / tenant.checkpoint.folder if tenant.checkpoint else None
        await self._trainer.start(tenant.name, tenant.seed, checkpoint)
        for call in tenant.repeat:
            if call.kind == "optim_step":
                with contextlib.suppress(CallRefused):  # as it was the first time
                    await self._trainer.step(tenant.name, _adam(call.payload))
            elif call.kind == "forward_backward":
                await self._pass(tenant, call)
            else:
                await self._load(tenant, msgspec.json.decode(call.payload, type=wire.LoadWeights), first=call.seq == 0)
        log.info("tenant %s: restored, %d calls repeated", tenant.id, len(tenant.repeat))
        tenant.repeat, tenant.loaded, tenant.restores = [], True, 0

    async def _answer_all(self, tenant: Tenant, why: str) -> None:
        """Let all calls fail that wait."""
        failed = wire.failed(why, "user")
        await self._record(tenant, *(Answered(seq, failed, "user") for seq in sorted(tenant.waiting)))

    async def _drop(self, tenant: Tenant) -> None:
        """Free what a tenant occupies; weights with a name remain."""
        await self._answer_all(tenant, f"the model {tenant.id} was unloaded")
        if tenant.loaded:
            await self._trainer.drop(tenant.name)
        if tenant.checkpoint is not None:
            await self._fresh(tenant, tenant.checkpoint.folder)
        tenant.names = {name: named for name, named in tenant.names.items() if name.startswith("tinker:")}
        tenant.checkpoint, tenant.repeat = None, []
        tenant.forget_results()
        self._turns.remove(tenant)
        tenant.loaded, self._keep_due = False, True
        await tenant.journal.compact(tenant.state(), small=True)
        await tenant.journal.synced()
        tenant.journal.close()

    async def _clean(self) -> None:
        trash, self._trash, self._keep_due = self._trash, [], False
        for folder in trash:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        snapshots = {each.key: each for tenant in self.tenants.values() for each in tenant.snapshots()}
        snapshots |= {each.key: each for each in self._sampling.values()}
        await self._trainer.keep(list(snapshots.values()))

    # ---- what clients ask for. Each method raises RefusedRequest.

    @property
    def _owners(self) -> dict[str, Owner]:
        return {owner.name: owner for owner in self.settings.owners or (Owner("", name="anyone"),)}

    def owner(self, key: str) -> Owner:
        """Return the owner of an API key."""
        if not self.settings.owners:
            return self._owners["anyone"]
        same = [owner for owner in self.settings.owners if hmac.compare_digest(owner.key.encode(), key.encode())]
        if not same:
            raise RefusedRequest(401, "X-API-Key: not a key of this service")
        return same[0]

    @contextlib.contextmanager
    def body(self, owner: Owner, size: int) -> Iterator[None]:
        """Hold the ``size`` bytes of a request while it is answered."""
        held = self._arriving[owner.name]
        if held and held + size > _OWNER_BYTES:
            raise RefusedRequest(429, f"{held} bytes of requests are being answered, the limit", retry_after_s=1)
        self._arriving[owner.name] += size
        try:
            yield
        finally:
            self._arriving[owner.name] -= size

    async def create_session(self, owner: Owner) -> str:
        session = secrets.token_hex(8)
        await self._open(Opened(session, owner.name))
        self._sessions[session] = owner.name
        return session

    def check_session(self, owner: Owner, session: str) -> None:
        """Refuse a session that is not the owner's (own)."""
        if self._sessions.get(session) != owner.name:
            raise RefusedRequest(404, f"session {session[:100]} not found")

    def heartbeat(self, owner: Owner, session: str) -> None:
        self.check_session(owner, session)
        self._heard[session] = time.monotonic()

    async def finish_session(self, owner: Owner, session: str) -> None:
        """Unload the models of a session."""
        self.check_session(owner, session)
        for tenant in list(self.tenants.values()):
            if tenant.id.startswith(f"{session}:"):
                await self.unload(owner, tenant.id)

    def model(self, owner: Owner, model_id: str) -> Tenant:
        """Return a model of the owner (own)."""
        tenant = self.tenants.get(model_id)
        if tenant is None or tenant.owner != owner.name:
            raise RefusedRequest(404, f"model {model_id[:200]} not found")
        return tenant

    async def create_model(self, owner: Owner, request: wire.CreateModel) -> dict[str, object]:
        served, lora = self.settings, request.lora_config or wire.Lora(self.settings.lora_rank)
        rules = (
            (request.base_model == served.base_model, f"base_model must be {served.base_model}"),
            (lora.rank == served.lora_rank, f"lora_config.rank must be {served.lora_rank}"),
            (lora.train_attn == served.attn, f"lora_config.train_attn must be {served.attn}"),
            (lora.train_mlp == served.mlp, f"lora_config.train_mlp must be {served.mlp}"),
            (request.optimizer_config.type == "adamw", "optimizer_config.type must be adamw"),
            (lora.seed is None or 0 <= lora.seed < 1 << 63, "lora_config.seed must be 0 to 2**63 - 1"),
        )
        for holds, problem in rules:
            if not holds:
                raise RefusedRequest(400, problem)
        if lora.seed is None:
            lora.seed = secrets.randbits(31)
        request.lora_config = lora
        return await self._create(owner, request.session_id, request.model_seq_id, "create_model", request)

    async def load_weights(self, owner: Owner, request: wire.LoadWeights) -> dict[str, object]:
        """Accept a load into a model, or into a new one of a session."""
        if request.model_id:
            return await self.accept(
                owner, request.model_id, request.seq_id, "load_weights", msgspec.json.encode(request)
            )
        if request.base_model not in (None, self.settings.base_model):
            raise RefusedRequest(400, f"base_model must be {self.settings.base_model}")
        try:
            self._saved(owner.name, request.path)
        except CallRefused as error:
            raise RefusedRequest(404, str(error)) from None
        request.seed = secrets.randbits(31)
        return await self._create(owner, request.session_id, request.model_seq_id, "load_weights", request)

    async def _create(
        self, owner: Owner, session: str, number: int, kind: str, request: msgspec.Struct
    ) -> dict[str, object]:
        """Accept the first call of a new tenant."""
        self.check_session(owner, session)
        model_id = f"{session}:train:{number}"
        if not 0 <= number < _AHEAD:
            raise RefusedRequest(400, f"model_seq_id must be 0 to {_AHEAD - 1}")
        if model_id not in self.tenants:
            mine = [each for each in self.tenants.values() if each.owner == owner.name and not each.unloaded]
            if len(mine) >= owner.models:
                heard = [self._heard.get(each.id.partition(":")[0], self._began) for each in mine]
                silent = time.monotonic() - min(heard)
                if silent < _SILENT_S:
                    why = f"{owner.name} has {len(mine)} models, the limit: those of an ended client go after a minute"
                    wait_s = math.ceil(_SILENT_S - silent) if silent > _HEARTBEAT_S else 0  # then the SDK asks again
                    raise RefusedRequest(429 if wait_s else 403, why, retry_after_s=wait_s)
                await self.unload(owner, mine[heard.index(min(heard))].id)
            self._add(model_id)
        return await self.accept(owner, model_id, 0, kind, msgspec.json.encode(request), first=True)

    async def accept(
        self, owner: Owner, model_id: str, seq: int, kind: str, payload: bytes, *, first: bool = False
    ) -> dict[str, object]:
        """Make a call durable, and return its future. A call that was accepted before has the same one (once)."""
        tenant = self.model(owner, model_id)
        if tenant.unloaded:
            raise RefusedRequest(404, f"model {model_id} was unloaded")
        if not (0 if first else 1) <= seq <= tenant.next + _AHEAD:
            raise RefusedRequest(400, f"seq_id must be 1 to {tenant.next + _AHEAD}")
        if not (seq < tenant.next or seq in tenant.waiting or seq in tenant.skipped):
            held = sum(len(call.payload) for call in tenant.waiting.values())
            is_full = len(tenant.waiting) >= owner.calls_waiting or held + len(payload) > _OWNER_BYTES
            if is_full and seq != tenant.next:
                raise RefusedRequest(
                    429, f"{len(tenant.waiting)} calls of {model_id} wait, {held} bytes: the limit", retry_after_s=1
                )
            call = Called(seq, kind, payload, time.time())
            if kind == "create_model":
                tenant.seed = seed_of(payload)
            tenant.waiting[seq], tenant.last_call = call, call.time
            self._append(tenant.journal, call)
        await self._synced(tenant.journal)
        self._work.set()
        return {"request_id": f"{model_id}:{seq}", "model_id": model_id}

    async def retrieve(self, owner: Owner, request_id: str) -> Answered | None:
        """Return the result of a future; None if it takes longer than HELD_S."""
        target, _, number = request_id.rpartition(":")
        if ":train:" not in target or not number.isdigit():
            return await self._sampled(owner, request_id)
        tenant, seq, deadline = self.model(owner, target), int(number), time.monotonic() + HELD_S
        while seq not in tenant.results:
            if seq < tenant.next:
                raise RefusedRequest(410, f"the result of {request_id} was retrieved before, and is gone")
            if seq not in tenant.waiting:
                raise RefusedRequest(404, f"request {request_id[:200]} not found")
            if not await _wait(tenant.changed, deadline - time.monotonic()):
                return None
        tenant.retrieved.add(seq)
        return tenant.results[seq]

    async def unload(self, owner: Owner, model_id: str) -> None:
        tenant = self.model(owner, model_id)
        if not tenant.unloaded:
            tenant.unloaded = True
            self._append(tenant.journal, Unloaded())
            await self._synced(tenant.journal)
            self._work.set()

    async def delete(self, owner: Owner, model_id: str, name: str) -> None:
        """Delete weights: ``weights/NAME`` or ``sampler_weights/NAME``."""
        tenant, path = self.model(owner, model_id), f"tinker://{model_id}/{name}"
        if path not in tenant.names:
            raise RefusedRequest(404, f"{path[:300]} not found")
        await self._record(tenant, Named(path))
        self._work.set()

    def _saved(self, owner: str, path: str) -> Path:
        """Return the folder of a saved state of this owner. Raises CallRefused."""
        tenant = self.tenants.get(path.removeprefix("tinker://").partition("/")[0])
        named = tenant.names.get(path) if tenant is not None and tenant.owner == owner else None
        if tenant is None or named is None or not named.folder:
            raise CallRefused(f"{path[:300]} not found: a path of save_state is needed, tinker://MODEL/weights/NAME")
        return tenant.folder / named.folder

    # ---- sampling

    async def create_sampler(self, owner: Owner, request: wire.CreateSampler) -> str:
        """Open a sampling session of the base model, or of weights with a name."""
        self.check_session(owner, request.session_id)
        if request.model_path is None and request.base_model != self.settings.base_model:
            raise RefusedRequest(400, f"base_model must be {self.settings.base_model}, or give model_path")
        sampler = f"{request.session_id}:sample:{request.sampling_session_seq_id}"
        if sampler not in self._samplers:
            path = request.model_path or ""
            self._weights(owner, path, sampler)
            self._samplers[sampler] = path
            await self._open(Opened(sampler, owner.name, path))
        return sampler

    def join(self, owner: Owner, sampler: str) -> int:
        """Return a number for a copy of the client of a sampling session; drawn, so that it is new after a restart."""
        self.sampler(owner, sampler)
        return 1 + secrets.randbelow(999_999_999)

    def sampler(self, owner: Owner, sampler: str) -> str:
        """Return the weights of a sampling session: a path, a model, or "" for the base model."""
        self.check_session(owner, sampler.partition(":")[0])
        if sampler not in self._samplers:
            raise RefusedRequest(404, f"sampling session {sampler[:200]} not found")
        return self._samplers[sampler]

    def _weights(self, owner: Owner, target: str, sampler: str) -> Snapshot | None:
        """Return the snapshot that a sampling session of ``target`` samples from; None: the base model."""
        if not target:
            return None
        name = target if target.startswith("tinker:") else sampler
        tenant = self.tenants.get(target.removeprefix("tinker://").partition("/")[0])
        named = tenant.names.get(name) if tenant is not None and tenant.owner == owner.name else None
        if tenant is None or named is None or named.snapshot is None:
            raise RefusedRequest(
                404,
                f"weights of {name[:300]} not found: a path of save_weights_for_sampler is kept until it is deleted, "
                f"and the newest {SNAPSHOTS} snapshots without a name",
            )
        return tenant.inflight if named.inflight else named.snapshot

    def sample(self, owner: Owner, request: wire.Sample) -> dict[str, object]:
        """Begin to sample, and return the future."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise RefusedRequest(400, "sampling_session_id and seq_id are needed")
        name = request.sampling_session_id
        snapshot = self._weights(owner, self.sampler(owner, name), name)
        request_id = f"{name}:{request.seq_id}"
        if request_id not in self._samples:
            if sum(who == owner.name and not task.done() for who, task in self._samples.values()) >= owner.samples:
                raise RefusedRequest(429, f"{owner.name} has {owner.samples} samples in work", retry_after_s=1)
            try:
                wire.sampling(request, self.settings.vocab, self.settings.longest)
            except CallRefused as error:
                raise RefusedRequest(400, str(error)) from None
            if snapshot is not None:
                self._sampling[request_id] = snapshot
            task = asyncio.create_task(self._sample(request_id, snapshot, request))
            self._samples[request_id] = owner.name, task
        ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    async def _sample(self, request_id: str, snapshot: Snapshot | None, request: wire.Sample) -> Answered:
        prompt, sampling = wire.sampling(request, self.settings.vocab, self.settings.longest)
        try:
            samples = await self._sampler.sample(snapshot, prompt, sampling)
            return Answered(0, wire.sample_response(samples, sampling.top_logprobs), proto=True)
        except (GenerationError, CallRefused) as error:
            category = "user" if isinstance(error, CallRefused) else "server"
            return Answered(0, wire.failed(str(error), category), category)
        except Exception as error:  # of one request: the others go on
            log.exception("sample %s", request_id)
            return Answered(0, wire.failed(f"{type(error).__name__}: {error}", "server"), "server")
        finally:
            self._sampling.pop(request_id, None)
            asyncio.get_running_loop().call_later(_KEPT_S, self._samples.pop, request_id, None)

    async def _sampled(self, owner: Owner, request_id: str) -> Answered | None:
        """Return a finished sample. One that a restart lost is 410: the SDK submits it again."""
        self.check_session(owner, request_id.partition(":")[0])
        if request_id not in self._samples:
            raise RefusedRequest(410, f"sample {request_id[:200]} is gone: submit it again")
        task = self._samples[request_id][1]
        await asyncio.wait({task}, timeout=HELD_S)
        if not task.done():
            return None
        asyncio.get_running_loop().call_later(_FETCHED_S, self._samples.pop, request_id, None)
        return task.result()

    def cancel(self, owner: Owner, request_id: str) -> None:
        """Stop a sample. Calls of training are not cancelled: those after them count on them."""
        self.check_session(owner, request_id.partition(":")[0])
        if ":train:" not in request_id and (found := self._samples.pop(request_id, None)):
            found[1].cancel()

    # ---- what the operator sees

    def status(self) -> dict[str, Any]:
        """Return the models that were called last, and what they have done; no keys."""
        models = [
            {
                "model": each.id, "owner": each.owner, "calls": each.next, "steps": each.steps, "tokens": each.tokens,
                "waiting": len(each.waiting), "unloaded": each.unloaded, "last_error": each.last_error,
            }
            for each in heapq.nlargest(_SHOWN, self.tenants.values(), key=lambda each: each.last_call)
        ]  # fmt: skip
        return {"base_model": self.settings.base_model, "models": models}

    # ---- the journals: one that cannot be written ends the process

    async def _open(self, record: Opened) -> None:
        self._append(self._journal, record)
        await self._synced(self._journal)

    def _append(self, journal: TenantJournal, record: Record) -> None:
        try:
            journal.append(record)
        except BaseException as error:
            self._end(error)
            raise

    async def _synced(self, journal: TenantJournal) -> None:
        try:
            await journal.synced()
        except Exception as error:
            self._end(error)
            raise

    def _end(self, error: BaseException) -> None:
        self._error = error
        self._work.set()


class _Broken(Exception):
    """The call cannot be carried out, and its tenant is not to blame."""


async def _wait(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for the event. Returns False if it takes longer than ``timeout_s``; None: without end."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _adam(payload: bytes) -> Adam:
    """Return the settings of an optimizer step. Raises CallRefused."""
    params = msgspec.json.decode(payload, type=wire.OptimStep).adam_params
    if params is None:
        raise CallRefused("adam_params is needed: only Adam is supported")
    for name in params.__struct_fields__:
        value, least = getattr(params, name), 0.0
        if not least <= value < (1 if name.startswith("beta") else float("inf")):
            raise CallRefused(
                f"adam_params.{name}={value} must be {'0 to 1' if name.startswith('beta') else 'at least 0'}"
            )
    return Adam(**msgspec.structs.asdict(params))


def _name(path: str | None, seq: int) -> str:
    name = f"{seq:06d}" if path is None else path
    if not _NAME.fullmatch(name):
        raise CallRefused(f"the name {name[:150]!r} must have letters, digits and _.- only, at most 128")
    return name
