"""Connects the ModelWorkers: all ranks of the present start of the trainer meet at the TCPStore of rank 0.

    MasterWorker                                  ──> key request_reply: {its incarnation, its address}
    rank 0    the MasterWorker answers, it binds  ──> key torch_store: {the same incarnation, address of the TCPStore}
    any rank  ──> connects there ──> reports itself ──> all ranks have ──> process groups
                    ^    └ no connection ─┐  └ another incarnation ─┐
                    └── reads the keys again, until the deadline <──┘

`same-start`: ranks meet only at a store that carries the incarnation of the present MasterWorker. Both keys are leased,
and outlive a killed process by its lease. So rank 0 goes to no MasterWorker that does not answer, and the others to no
store without rank 0 behind it. The MasterWorker of a lost machine may still answer: its key has another start of the
trainer, and no rank goes to it.

torch waits in C++, where no signal reaches Python. So all of it runs on a thread, and the caller waits for that thread,
for the request to stop, and for the deadline.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from realsys.cluster.names.contract import Names, NameStore, Tree
from realsys.cluster.network import advertised_host, bind_tcp, join_host_port, port_of, split_host_port
from realsys.cluster.process import on_thread
from realsys.config.schema_cluster import ClusterConfig
from realsys.errors import MALFORMED, NameStoreError, WaitTimeout
from realsys.train.megatron.device import Device
from realsys.types import TrainerAddress

CONNECT_S = 5.0  # limit of one try to connect
_LOOK_S = 0.2  # between two checks whether all ranks have reported, and between two tries
_GRACE_S = 2.0  # after the time limit, in which the thread names the missing process, on a busy machine too
_NAMED = 8  # missing ranks in a message


@dataclass(frozen=True, slots=True)
class RankSeat:
    """One rank at the rendezvous.

    register  publishes a key with this process's lease
    answers   returns True if the MasterWorker at an address completes a handshake within a time
    on_stop   calls its argument when the process gets a signal to stop
    start     of the trainer that this rank belongs to
    """

    rank: int
    world: int
    cluster: ClusterConfig
    store: NameStore
    names: Names
    register: Callable[[str, str], None]
    answers: Callable[[str, float], bool]
    on_stop: Callable[[Callable[[], None]], None]
    start: str = ""


@contextlib.contextmanager
def rendezvous(seat: RankSeat, device: Device) -> Iterator[str]:
    """Keep torch.distributed initialised inside the block, over all ranks. Yields the MasterWorker's address.

    Raises WaitTimeout, which names the missing process, after ``cluster.start_timeout_s`` (2 s later if torch itself
    waits), and WaitTimeout when the process gets a signal to stop. The process must end then, because its thread may
    still wait.
    """
    limit_s = seat.cluster.start_timeout_s
    meeting = _Meeting(seat, limit_s)

    def join() -> str:
        _initialise(meeting.join(), seat.rank, seat.world, seat.cluster, device)
        return meeting.master.address

    yield on_thread(join, seat.on_stop, limit_s + _GRACE_S, lambda: meeting.waits_for)
    dist.destroy_process_group()  # no try/finally: see process_groups


@contextlib.contextmanager
def process_groups(tcp: Store, rank: int, world: int, cluster: ClusterConfig, device: Device) -> Iterator[None]:
    """Keep torch.distributed initialised inside the block.

    After an error the groups stay as they are: destroying them may wait for ranks that wait for
    this one.
    """
    _initialise(tcp, rank, world, cluster, device)
    # No try/finally: see the docstring. The process ends after an error, and with it the groups.
    yield
    dist.destroy_process_group()


def _initialise(tcp: Store, rank: int, world: int, cluster: ClusterConfig, device: Device) -> None:
    dist.init_process_group(
        device.backend,
        store=tcp,
        rank=rank,
        world_size=world,
        # A collective waits for the slowest rank, which may be in a whole call: as long as the
        # master waits.
        timeout=timedelta(seconds=cluster.request_timeout_s),
        # With a device, NCCL connects the world now. A transfer between some of the workers needs that: if it
        # were the first operation of the world, it would wait for all others. The groups are split off the world.
        device_id=device.device if device.is_cuda else None,
    )


class _Meeting:
    """The rendezvous of one rank. ``waits_for``: the present obstacle, for the caller's message."""

    def __init__(self, seat: RankSeat, limit_s: float) -> None:
        self.waits_for = "the name store"
        self.master = TrainerAddress("", "")
        self._seat = seat
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._changes: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        self._tree: Tree = {}
        self._invited = ""  # incarnation for which rank 0 has registered its store
        self._own: TCPStore | None = None  # that store
        self._own_address = ""

    def join(self) -> Store:
        """Return the store in which all ranks of one start have reported themselves. Raises WaitTimeout."""
        with self._seat.store.watch(self._seat.names.trainer, self._changes.put):
            self._look(0.0)
            while (tcp := self._meet()) is None:
                self._look(_LOOK_S)
            return tcp

    def _meet(self) -> Store | None:
        """Return the store in which all ranks have reported; None if the keys must be read again."""
        with contextlib.suppress(dist.DistError):  # the process behind the store has ended
            if (tcp := self._reach()) is not None and self._all_report(tcp):
                return tcp
        return None

    def _look(self, pause_s: float) -> None:
        """Take the newest state of the keys, after a change or ``pause_s``. Raises WaitTimeout at the deadline."""
        if time.monotonic() >= self._deadline:
            raise WaitTimeout(f"waited {self._limit_s:g} s for {self.waits_for}")
        with contextlib.suppress(queue.Empty):
            self._tree = self._changes.get(timeout=pause_s)
            while True:
                self._tree = self._changes.get_nowait()

    def _entry(self, key: str) -> TrainerAddress | None:
        if key not in self._tree:
            return None
        try:
            return msgspec.json.decode(self._tree[key], type=TrainerAddress)
        except MALFORMED as error:
            raise NameStoreError(f"name store: {key} holds no TrainerAddress: delete the key ({error})") from None

    def _reach(self) -> Store | None:
        """Return the store of the present start; None if it does not exist yet."""
        names = self._seat.names
        master = self._entry(names.request_reply)
        if master is None or master.start != self._seat.start:
            self.waits_for = f"the address of the MasterWorker (name store key {names.request_reply}); see its log"
            return None
        self.master = master
        tcp = self._serve() if self._seat.rank == 0 else self._connect()
        return None if tcp is None else PrefixStore(master.incarnation, tcp)

    def _serve(self) -> Store | None:
        """Return the own store, registered for the present MasterWorker if that one answers."""
        if self._invited == self.master.incarnation:
            return self._own
        self.waits_for = f"the MasterWorker, which does not answer at {self.master.address}; see its log"
        if not self._seat.answers(self.master.address, CONNECT_S):
            return None
        if self._own is None:
            self._own = self._bind()
        # Registered after the socket listens, so a worker that reads the address can connect.
        entry = TrainerAddress(self.master.incarnation, self._own_address)
        self._seat.register(self._seat.names.torch_store, msgspec.json.encode(entry).decode())
        self._invited = self.master.incarnation
        return self._own

    def _bind(self) -> TCPStore:
        # TCPStore's own socket would listen on every interface. This one is bound to the cluster's
        # host only. Every worker connects at about the same time; a short backlog would refuse
        # some.
        host, world = self._seat.cluster.host, self._seat.world
        listener = bind_tcp(host)
        listener.listen(max(128, world))
        port = port_of(listener)
        self._own_address = join_host_port(advertised_host(host), port)
        return TCPStore(
            host.strip("[]"),
            port,
            world,
            is_master=True,
            timeout=timedelta(seconds=self._limit_s),
            wait_for_workers=False,  # they learn the address only from the key
            master_listen_fd=listener.detach(),
        )

    def _connect(self) -> Store | None:
        """Return a client of rank 0's store; None if that store is of another start, or does not answer."""
        entry = self._entry(self._seat.names.torch_store)
        if entry is None or entry.incarnation != self.master.incarnation:
            self.waits_for = f"model_worker/0 to join start {self.master.incarnation} of the trainer; see its log"
            return None
        self.waits_for = f"the torch store of model_worker/0 at {entry.address}"
        try:
            # On a thread: no time limit of TCPStore holds for a peer that accepts and says nothing.
            return on_thread(lambda: self._client(entry.address), self._seat.on_stop, CONNECT_S, lambda: self.waits_for)
        except (OSError, WaitTimeout) as error:
            self.waits_for += f" (last try: {getattr(error, 'strerror', None) or 'no answer'}); see its log"
            return None

    def _client(self, address: str) -> Store:
        host, port = split_host_port(address)
        # A plain socket first: TCPStore repeats a refused connection until its whole time is over.
        socket.create_connection((host, port), CONNECT_S).close()
        limit = timedelta(seconds=self._limit_s)
        return TCPStore(host, port, self._seat.world, is_master=False, timeout=limit, wait_for_workers=False)

    def _all_report(self, tcp: Store) -> bool:
        """Report this rank, and wait for the others. Returns False if another MasterWorker registers before that."""
        rank, world, start = self._seat.rank, self._seat.world, self.master.incarnation
        if tcp.add(f"here/{rank}", 1) == 1 and tcp.add("here", 1) == world:
            tcp.set("all", "here")
        self.waits_for = f"the other ranks of start {start} of the trainer; see the log of model_worker/0"
        while not tcp.check(["all"]):
            try:
                self._look(_LOOK_S)
            except WaitTimeout:
                self._name_missing(tcp)
            master = self._entry(self._seat.names.request_reply)
            if master is not None and master.incarnation != start:
                return False
        self.waits_for = f"torch.distributed to connect all {world} ranks"
        return True

    def _name_missing(self, tcp: Store) -> NoReturn:
        if self._seat.rank == 0:  # its store is at hand; hundreds of ranks would ask hundreds of questions each
            missing = [rank for rank in range(self._seat.world) if not tcp.check([f"here/{rank}"])]
            names = ", ".join(f"model_worker/{rank}" for rank in missing[:_NAMED])
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            self.waits_for = f"{names}{more}; see their logs"
        raise WaitTimeout(f"waited {self._limit_s:g} s for {self.waits_for}")
