"""A step loop over simulated workers and the manager's real state machine, for tests of the master.

What writes to disk is a hand-written fake.
"""

import asyncio
import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realsys import loops
from realsys.algorithm.balance import token_costs
from realsys.cluster.aio import from_thread, in_thread
from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import SOURCE_KEYS, dataflow_of
from realsys.config.schema import Config
from realsys.data.submitted import SubmittedWriter
from realsys.errors import WeightsError
from realsys.manager.decisions import ManagerSettings, ManagerState
from realsys.manager.messages import (
    AllocateRequest,
    Answer,
    ClaimReply,
    ClaimRequest,
    FinishRequest,
    TrainedReply,
    TrainedRequest,
)
from realsys.manager.operations import status
from realsys.model_calls import MfcRequest
from realsys.rollout.episodes import reason_to_drop
from realsys.session import Session, run_script
from realsys.train.master.devices import Devices
from realsys.train.master.intake import Intake
from realsys.train.master.intake_decisions import IntakeSettings, IntakeState
from realsys.train.master.session import MasterSession, SessionParts, _Step
from realsys.train.master.step import CallArguments, StepRunner, plan_roles
from realsys.train.master.stopping import Stopping
from realsys.types import Episode, PublishedVersion, SampleMeta, ServerAddress, Ticket
from tests.support.processes.config_trees import changed
from tests.support.streams.simulated_workers import SimulatedWorkers

BOUND_S = 60.0
SMALL = ("rollout.group_size=2", "train.batch_groups=2", "train.ppo.minibatches=2", "asynchronous.max_staleness=1")


class Manager:
    """The manager's state behind the client's calls, with one server that serves each published version."""

    def __init__(self, config: Config, prompts: int, epochs: int = 0) -> None:
        group, batch = config.rollout.group_size, config.train.batch_groups
        eta = config.asynchronous.max_staleness
        settings = ManagerSettings(batch, eta, 0, group, 1, {"train": prompts, "eval": 1}, total_epochs=epochs)
        self.state, self.told = ManagerState(settings), list[TrainedRequest]()
        self.state.observe_servers([ServerAddress("generation_server/0", "http://h:0", 1, "h", "1")])
        self.changed = asyncio.Event()
        self.publish(0)

    def publish(self, version: int) -> None:
        self.state.servers.publish(PublishedVersion(version, "m", f"/v{version}", version))
        order: Any = self.state.next_order("generation_server/0", "1", 0.0)
        assert self.state.begin_update(order, 0.0) and self.state.servers.succeeded(order, 0.1, {"pause_s": 0.0})

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        reply = self.state.claim(request, 0.0)
        assert isinstance(reply, ClaimReply)
        return reply

    async def trained(self, request: TrainedRequest) -> TrainedReply:
        self.told.append(request)
        reply = self.state.trained(request, 0.0)
        self.changed.set()
        return reply

    async def status(self) -> dict[str, Any]:
        return status(self.state, 0.0, 0.0)

    def rollouts(self, config: Config, *rewards: Sequence[float]) -> list[tuple[Ticket, list[SampleMeta]]]:
        """Generate one group per reward, as long as admission allows; return those that pass the filter."""
        groups = []
        for number, ticket in enumerate(self.state.allocate(AllocateRequest("w", len(rewards)), 0.0).tickets):
            episodes = [Episode([], reward, reward > 0) for reward in rewards[number]]
            if reason := reason_to_drop(episodes, config.train.ppo.filter):
                lost = {reason: [3] * len(episodes)}
                finish = FinishRequest(ticket.ticket_id, ticket.attempt, "w", "filtered", reason, lost_tokens=lost)
                self.state.finish(finish, 0.0)
                continue
            answers = [Answer(r, r > 0, 3, "stop", ticket.version, ticket.version) for r in rewards[number]]
            self.state.finish(FinishRequest(ticket.ticket_id, ticket.attempt, "w", "accepted", "", answers), 0.0)
            groups.append(
                (
                    ticket,
                    [
                        SampleMeta(
                            f"{ticket.ticket_id}/{k}", ticket.ticket_id, 0, 8, 3, r, False, ticket.version,
                            ticket.version, 0, episode=k, group_rows=len(rewards[number]), correct=r > 0,
                        )
                        for k, r in enumerate(rewards[number])
                    ],
                )
            )  # fmt: skip
        return groups


class Versions:
    """A publisher whose versions are served as soon as they are published. ``wrote``: all writes in order.

    ``holds``: a publication lasts until ``complete``. ``broken``: makes it fail.
    """

    def __init__(self, manager: Manager, wrote: list[str]) -> None:
        self._manager = manager
        self._wrote = wrote
        self._writing = 0
        self.begun: asyncio.Queue[int] = asyncio.Queue()  # versions
        self.awaited = asyncio.Event()  # a caller waits for the end of a publication
        self._ended: asyncio.Event | None = None
        self.holds = False
        self.broken = asyncio.Event()
        self.kept: list[Sequence[int]] = []  # versions in use that the manager named, after each step
        self.looks: list[int] = []  # newest version at each check whether it can be served

    async def begin(self, version: int, step: int, saved: Any = None) -> dict[str, float]:
        await self.finish()
        self._ended = asyncio.Event()
        self._writing = version
        self.begun.put_nowait(version)
        if not self.holds:
            self.complete()
        return {"save": 0.25, "publish": 0.5}

    def complete(self) -> None:
        assert self._ended is not None
        self._manager.publish(self._writing)
        self._wrote.append(f"v{self._writing}")
        self._ended.set()

    async def finish(self) -> None:
        if self._ended is not None and not self._ended.is_set():
            self.awaited.set()
            await self._ended.wait()

    async def watch(self) -> None:
        await self.broken.wait()
        raise WeightsError("cannot write v00000001.tmp: No space left on device")

    def keep(self, versions: Sequence[int], pins: object = ()) -> None:
        assert versions[-1:] == [self._manager.state.version], "no server will begin an older version"
        self.kept.append(versions)

    async def repair(self, status: Mapping[str, Any]) -> None:
        self.looks.append(status["version"])

    async def export(self, target: Path) -> None:
        await self.finish()
        self._wrote.append(str(target))


class Disk:
    """Checkpoints that record all writes in order."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self.wrote: list[str] = []

    async def after_step(self, step: int) -> None:
        assert self._manager.told[-1].version == step, "the ledger must know before a checkpoint says so"
        self.wrote.append(f"checkpoint {step}")

    async def finish(self, *, stopped: bool) -> None:
        self.wrote.append("stopped" if stopped else "finish")


async def unused(*_: object) -> Any:
    raise AssertionError("no server shares devices with a rank")


class NoEvaluations:
    async def finished(self) -> list[dict[str, Any]]:
        return []


class Run:
    """A loop over simulated workers, and the groups that are to arrive."""

    def __init__(self, *settings: str, allocation: str = "sglang.d1+d2", prompts: int = 100, epochs: int = 0) -> None:
        self.config = config = changed(*SMALL, *settings)
        flow = dataflow_of(config)
        meshes = place(parse_allocation(allocation), dict.fromkeys(["actor", *flow.roles]))
        self.manager, self.records = Manager(config, prompts, epochs), list[dict[str, Any]]()
        self.workers: Any = SimulatedWorkers(flow, meshes, 1 + max(w for m in meshes.values() for w in m.workers))
        self.disk, self.stop, manager = Disk(self.manager), asyncio.Event(), self.manager
        self.versions = Versions(manager, self.disk.wrote)
        decisions = IntakeState(IntakeSettings.of(config), trainer_incarnation="")
        self.intake = Intake(decisions, self.workers, manager, self.versions.repair)  # type: ignore[arg-type]
        self.arguments = CallArguments(config, flow, config.train.total_steps)
        written: Any = {"publisher": self.versions, "checkpoints": self.disk, "step_log": self.records}
        parts: Any = {**written, "manager": manager}
        plan = functools.partial(plan_roles, config, meshes, dict.fromkeys(meshes, token_costs))
        parts_of_session = SessionParts(
            runner=StepRunner(config, flow, meshes, plan, self.workers),
            stopping=Stopping(self.stop, self.workers, Path(os.devnull)),
            intake=self.intake,
            arguments=self.arguments,
            evaluations=NoEvaluations(),  # type: ignore[arg-type]
            show=self._show,
            devices=Devices(unused, unused, incarnation="", timeout_s=BOUND_S, shared=False),
            workers=self.workers,
            tokenizer=None,  # type: ignore[arg-type]
            open_submitted=lambda: SubmittedWriter(Path(tempfile.mkdtemp()) / "rows", config.data, prompts),
            **parts,
        )
        total_steps = config.train.total_steps
        self.session = MasterSession(
            config, parts_of_session, hf_folder=Path("hf"), total_steps=total_steps, stop=self.stop
        )

    async def train(self, done: int = 0, script: Any = loops.train) -> int:
        """Run a training loop from step ``done``, in a thread, as the MasterWorker does; return the steps done."""
        loop = asyncio.get_running_loop()

        def call(method: str, *args: Any) -> Any:
            return from_thread(loop, self.session.perform, method, *args)

        own = Session(call, self.config, Path(os.devnull))
        return await self.session.run(lambda: in_thread("training loop", lambda: run_script(script, own, "mine")), done)

    async def step(self, number: int) -> None:
        """Train one step."""
        self.session._done, self.session._step = number - 1, _Step(number)
        batch = await self.session.prepare(0, 0.0)
        assert batch is not None
        await self.session.update(batch.number)
        await self.session.publish()

    async def _show(self, fields: dict[str, Any]) -> None:
        assert fields["step"] == self.records[-1]["step"]

    def arrive(self, *rewards: Sequence[float]) -> list[Ticket]:
        """Deliver groups to worker 0."""
        tickets = []
        for ticket, samples in self.manager.rollouts(self.config, *rewards):
            for sample in samples:
                self.workers.held[0] |= {(k, sample.sample_id) for k in SOURCE_KEYS}
            self.intake.on_samples(samples)
            tickets.append(ticket)
        return tickets

    async def serve(self, work: Any) -> Any:
        async with asyncio.timeout(BOUND_S), self.workers.serving():
            return await work

    def calls(self) -> list[MfcRequest]:
        return [sent.payload for sent in self.workers.sent if isinstance(sent.payload, MfcRequest)]


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body(), 2 * BOUND_S))
