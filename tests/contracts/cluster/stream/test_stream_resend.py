"""Push-pull: what is acknowledged is stored, what is not is kept, and nothing is handed over twice."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from multiprocessing.connection import Connection

import msgspec
import zmq

from realsys.cluster.stream.codec import Push, encode_group
from realsys.cluster.stream.push_pull import Puller, Pusher, PushLimits
from realsys.errors import KeyMissing, StreamError
from realsys.types import Group
from tests.support.streams.stream_parts import (
    BOUND_S,
    CuttableProxy,
    PullerCrash,
    PullerThread,
    make_group,
    names,
    pulling,
    push_all,
)


def test_a_closing_sender_loses_nothing_that_was_acknowledged() -> None:
    async def run(puller: PullerThread) -> None:
        for i in range(10):
            pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")  # the same name each time
            await pusher.push(make_group(f"t{i}"))
            await pusher.close()

    with pulling() as puller:
        asyncio.run(run(puller))
        assert puller.tickets == names(10)
    assert puller.stats.duplicates == 0


def test_close_returns_while_connection_opens() -> None:
    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))
        async with asyncio.timeout(BOUND_S):
            # Every turn of the loop is looked at, so that the close comes in the one in which the connection opened.
            while True:
                session = pusher._links[0]._session
                if session is not None and session.up:
                    break
                await asyncio.sleep(0)
            await pusher.close()
        await asyncio.wait([push])
        assert push.exception() is None or isinstance(push.exception(), StreamError)

    with pulling() as puller:
        asyncio.run(run(puller))


GROUPS, MOST = 400, 200  # pushed in all; what the first puller stores if nobody kills it before


def serve_until_killed(pipe: Connection) -> None:
    puller = Puller()
    pipe.send(puller.address)
    stored = 0

    def store(group: Group) -> None:
        nonlocal stored
        if stored == MOST:
            pipe.recv()  # for ever
        pipe.send(group.ticket.ticket_id)
        stored += 1

    while puller.socket.poll(BOUND_S * 1000):
        puller.drain(store, budget=1)


def test_puller_killed_and_restarted_elsewhere_loses_nothing() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_until_killed, args=(there,), daemon=True)
    process.start()
    there.close()
    assert here.poll(BOUND_S)
    addresses = [here.recv()]
    before: list[str] = []
    acknowledged_before: set[str] = set()
    acknowledged: set[str] = set()

    def kill_after_three() -> PullerThread:
        for _ in range(3):
            assert here.poll(BOUND_S)
            before.append(here.recv())
        process.kill()
        process.join(BOUND_S)
        while here.poll(0):
            try:
                before.append(here.recv())
            except EOFError:
                break
        return PullerThread()

    async def run() -> PullerThread:
        pusher = Pusher(lambda dp: addresses[-1], [0], "rollout_worker/0", limits=PushLimits(max_in_flight=3))

        async def push(ticket: str) -> None:
            await pusher.push(make_group(ticket))
            acknowledged.add(ticket)

        pushes = [asyncio.create_task(push(ticket)) for ticket in names(GROUPS)]
        second = await asyncio.to_thread(kill_after_three)
        acknowledged_before.update(acknowledged)
        addresses.append(second.address)
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*pushes)
        await pusher.close()
        return second

    second = asyncio.run(run())
    second.close()
    here.close()
    assert acknowledged_before <= set(before)  # an acknowledgement means stored
    assert set(before) | set(second.tickets) == set(names(GROUPS))
    for tickets in (before, second.tickets):
        assert len(tickets) == len(set(tickets))


def test_stored_unacknowledged_group_goes_to_next_incarnation() -> None:
    def crash(group: Group) -> None:
        if group.ticket.ticket_id == "t2":
            raise PullerCrash

    first, second = PullerThread(crash), PullerThread()

    async def run() -> None:
        asked = []

        def resolve(dp: int) -> str:
            asked.append(dp)
            return first.address if len(asked) == 1 else second.address

        pusher = Pusher(resolve, [7], "rollout_worker/0", limits=PushLimits(max_in_flight=2))
        await push_all(pusher, names(6))
        await pusher.close()
        assert set(asked) == {7}

    asyncio.run(run())
    first.join()
    second.close()
    assert first.tickets == ["t0", "t1"]
    assert second.tickets[-4:] == ["t2", "t3", "t4", "t5"]


def test_cut_connection_resends_and_puller_drops_duplicates() -> None:
    """The acknowledgement of t0 is held back by the store until the connection is gone."""
    stored, cut = threading.Event(), threading.Event()

    def hold(group: Group) -> None:
        if group.ticket.ticket_id == "t0":
            stored.set()
            assert cut.wait(BOUND_S)

    async def run(proxy: CuttableProxy) -> None:
        pusher = Pusher(lambda dp: proxy.address, [0], "rollout_worker/0")
        push = asyncio.create_task(push_all(pusher, names(3)))
        assert await asyncio.to_thread(stored.wait, BOUND_S)
        proxy.cut()
        cut.set()
        await push
        await pusher.close()

    with pulling(hold) as puller:
        proxy = CuttableProxy(puller.address)
        try:
            asyncio.run(run(proxy))
        finally:
            proxy.close()
    assert puller.tickets == names(3)
    assert puller.stats.duplicates >= 1
    assert proxy.accepted >= 2


def test_pusher_waits_for_missing_address() -> None:
    with pulling() as puller:
        answers = iter([KeyMissing("pull/0"), KeyMissing("pull/0")])

        def resolve(dp: int) -> str:
            if (problem := next(answers, None)) is not None:
                raise problem
            return puller.address

        async def run() -> None:
            pusher = Pusher(resolve, [0], "rollout_worker/0")
            await push_all(pusher, ["t0"])
            await pusher.close()

        asyncio.run(run())
        assert puller.tickets == ["t0"]


def test_resent_sequence_is_acknowledged_but_not_stored_again() -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    try:
        with pulling() as puller:
            dealer.connect(puller.address)
            for sequence, floor in ((0, 0), (1, 0), (0, 0), (1, 1), (2, 2), (0, 0)):
                header = msgspec.msgpack.encode(Push("rollout_worker/0", sequence, floor))
                dealer.send_multipart([header, *encode_group(make_group(f"t{sequence}"))])
            puller.wait_until(lambda: puller.stats.duplicates == 3)
    finally:
        context.destroy(linger=0)
    assert puller.tickets == ["t0", "t1", "t2"]
