"""Ranks at the rendezvous without a MasterWorker process: a bound socket stands in for it."""

import contextlib
from collections.abc import Iterator

import msgspec

from realsys.cluster.names.contract import Names, NameStore
from realsys.cluster.stream import sockets
from realsys.cluster.stream.security import CurveKeys
from realsys.config.schema import Config
from realsys.train.megatron.rendezvous import RankSeat
from realsys.types import TrainerAddress

NAMES = Names("user", "experiment", "trial")


def make_seat(config: Config, store: NameStore, rank: int, world: int, keys: CurveKeys | None = None) -> RankSeat:
    return RankSeat(
        rank,
        world,
        config.cluster,
        store,
        NAMES,
        register=lambda key, value: store.add(key, value, replace=True),
        answers=lambda address, timeout_s: sockets.answers(address, keys, timeout_s),
        on_stop=lambda callback: None,
    )


def announce(store: NameStore, key: str, incarnation: str, address: str, start: str = "") -> None:
    """Write a key of the rendezvous."""
    store.add(key, msgspec.json.encode(TrainerAddress(incarnation, address, start)).decode(), replace=True)


def announced(store: NameStore, key: str) -> TrainerAddress:
    return msgspec.json.decode(store.get(key), type=TrainerAddress)


@contextlib.contextmanager
def master_of(
    store: NameStore, incarnation: str, host: str = "127.0.0.1", keys: CurveKeys | None = None, start: str = ""
) -> Iterator[str]:
    """Answer handshakes as the MasterWorker of a start does, and register. Yields the address."""
    server = sockets.bind_server(host, keys)
    announce(store, NAMES.request_reply, incarnation, server.address, start)
    try:
        yield server.address
    finally:
        server.close()
