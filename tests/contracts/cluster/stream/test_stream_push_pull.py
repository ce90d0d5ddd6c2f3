"""Push-pull: groups arrive whole and in order, to whom they are for; what is wrong is refused, by name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from zmq.utils import garbage

from realsys.cluster.stream import push_pull as pusher_module
from realsys.cluster.stream.codec import Push, PushAck, PushNack, encode_group
from realsys.cluster.stream.push_pull import Pusher, PushLimits
from realsys.cluster.topology import group_contiguously
from realsys.errors import KeyMissing, StreamError, WaitTimeout
from realsys.types import Group
from tests.support.streams.stream_parts import (
    BOUND_S,
    PullerThread,
    make_group,
    names,
    pulling,
    push_all,
    router_by_hand,
)


@pytest.fixture(scope="module", autouse=True)
def frame_collector() -> Iterator[None]:
    """pyzmq starts one thread per process when the first large frame is sent without a copy; here it starts earlier."""
    garbage.gc.start()
    yield
    garbage.gc.stop()


def test_groups_arrive_in_order_and_whole() -> None:
    stored: list[Group] = []

    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0", limits=PushLimits(max_in_flight=4))
        await push_all(pusher, names(30))
        await pusher.close()

    with pulling(stored.append) as puller:
        asyncio.run(run(puller))
        assert puller.wait_for(30) == names(30)
    assert puller.stats.received == 30
    assert stored[7].episodes[1].rows[0].tokens.tolist() == make_group("t7").episodes[1].rows[0].tokens.tolist()


def test_large_groups_reuse_their_memory_without_mixing() -> None:
    sums: list[int] = []

    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0", limits=PushLimits(max_in_flight=3))
        groups = [make_group(str(length), episodes=1, length=length) for length in range(200_000, 200_012)]
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*map(pusher.push, groups))
        await pusher.close()

    with pulling(lambda group: sums.append(int(group.episodes[0].rows[0].tokens.sum(dtype=int)))) as puller:
        asyncio.run(run(puller))
    expected = [
        make_group("", 1, length).episodes[0].rows[0].tokens.sum(dtype=int) for length in range(200_000, 200_012)
    ]
    assert sums == expected


@pytest.mark.parametrize(("senders", "receivers"), [(5, 2), (2, 5), (3, 3)])
def test_grouped_senders_reach_every_receiver(senders: int, receivers: int) -> None:
    pullers = [PullerThread() for _ in range(receivers)]
    grouping = group_contiguously(senders, receivers)

    async def run() -> None:
        pushers = [
            Pusher(lambda dp: pullers[dp].address, mine, f"rollout_worker/{i}") for i, mine in enumerate(grouping)
        ]
        for i, pusher in enumerate(pushers):
            await push_all(pusher, [f"{i}-{k}" for k in range(2 * len(grouping[i]))])
        for pusher in pushers:
            await pusher.close()

    try:
        asyncio.run(run())
        for dp, puller in enumerate(pullers):
            mine = [i for i, served in enumerate(grouping) if dp in served]
            assert sorted({int(ticket.split("-")[0]) for ticket in puller.tickets}) == mine
            assert len(puller.tickets) == 2 * len(mine)
    finally:
        for puller in pullers:
            puller.close()


def test_unacknowledged_push_names_group_receiver_and_reason() -> None:
    def resolve(dp: int) -> str:
        raise KeyMissing(f"no key pull/{dp}")

    async def run() -> None:
        pusher = Pusher(resolve, [3], "rollout_worker/0", limits=PushLimits(push_timeout_s=0.2))
        message = r"rollout_worker/0: group t0 not acknowledged in 0.2 s by puller 3 .*no key pull/3"
        with pytest.raises(WaitTimeout, match=message):
            await pusher.push(make_group("t0"))
        await pusher.close()

    asyncio.run(run())


def test_group_leaves_a_stranger_at_the_old_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver has died, and another process has its port: the connection stands, without acknowledgements."""
    monkeypatch.setattr(pusher_module, "MOVED_S", 0.05)
    stored: list[Group] = []

    async def run(puller: PullerThread, stranger: str) -> None:
        addresses = iter([stranger])
        pusher = Pusher(lambda dp: next(addresses, puller.address), [0], "rollout_worker/0")
        await push_all(pusher, names(3))
        await pusher.close()

    with router_by_hand() as (_, stranger), pulling(stored.append) as puller:
        asyncio.run(run(puller, stranger))
        assert puller.wait_for(3) == names(3)


def test_closing_fails_the_pushes_that_wait() -> None:
    def resolve(dp: int) -> str:
        raise KeyMissing("pull/0")

    async def run() -> None:
        pusher = Pusher(resolve, [0], "rollout_worker/0")
        push = asyncio.create_task(pusher.push(make_group("t0")))
        await asyncio.sleep(0)
        await pusher.close()
        with pytest.raises(StreamError, match="t0: the pusher was closed"):
            await push
        with pytest.raises(StreamError, match="push after close"):
            await pusher.push(make_group("t1"))

    asyncio.run(run())


def test_a_defect_in_resolve_is_raised_by_push() -> None:
    def resolve(dp: int) -> str:
        raise ZeroDivisionError("oops")

    async def run() -> None:
        pusher = Pusher(resolve, [0], "rollout_worker/0")
        for _ in range(2):
            with pytest.raises(StreamError, match="oops") as caught:
                await pusher.push(make_group("t0"))
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        await pusher.close()

    asyncio.run(run())


def test_no_more_than_the_limit_is_in_flight() -> None:
    """A puller by hand that acknowledges when it likes."""

    async def run(router: zmq.Socket[bytes], address: str) -> None:
        def receive() -> tuple[bytes, int]:
            assert router.poll(BOUND_S * 1000)
            route, header, *_ = router.recv_multipart()
            return route, msgspec.msgpack.decode(header, type=Push).sequence

        pusher = Pusher(lambda dp: address, [0], "rollout_worker/0", limits=PushLimits(max_in_flight=2))
        pushes = asyncio.create_task(push_all(pusher, names(5)))
        (route, first), (_, second) = [await asyncio.to_thread(receive) for _ in range(2)]
        assert (first, second) == (0, 1)
        assert not await asyncio.to_thread(router.poll, 200)
        router.send_multipart([route, msgspec.msgpack.encode(PushAck([0]))])
        assert (await asyncio.to_thread(receive))[1] == 2
        router.send_multipart([route, msgspec.msgpack.encode(PushAck([1, 2]))])
        assert {(await asyncio.to_thread(receive))[1] for _ in range(2)} == {3, 4}
        router.send_multipart([route, msgspec.msgpack.encode(PushAck([3, 4]))])
        await pushes
        await pusher.close()

    with router_by_hand() as (router, address):
        asyncio.run(run(router, address))


def test_refused_group_is_stream_error_for_its_sender() -> None:
    """Other senders keep pushing to the same puller."""

    def store(group: Group) -> None:
        if group.ticket.ticket_id == "t1":
            raise StreamError("token 99999 is outside the vocabulary")

    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        await pusher.push(make_group("t0"))
        with pytest.raises(StreamError, match="puller 0 at .* refused group t1: token 99999 is outside"):
            await pusher.push(make_group("t1"))
        await pusher.push(make_group("t2"))
        await pusher.close()

    with pulling(store) as puller:
        asyncio.run(run(puller))
    assert puller.tickets == ["t0", "t2"]
    assert puller.stats.refused == 1


def test_undecodable_group_is_refused() -> None:
    """The pusher gets an error instead of waiting for ever."""

    async def run(puller: PullerThread) -> None:
        pusher = Pusher(lambda dp: puller.address, [0], "rollout_worker/0")
        bad = make_group("t0")
        bad.episodes[0].rows[0].logprobs[0] = float("nan")
        with pytest.raises(StreamError, match=r"refused group t0: group t0: logprobs span \[nan"):
            await pusher.push(bad)
        await pusher.push(make_group("t1"))
        await pusher.close()

    with pulling() as puller:
        asyncio.run(run(puller))
    assert puller.tickets == ["t1"]
    assert puller.stats.malformed == 1


def test_garbage_is_counted_logged_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The log line names the sender."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    try:
        with caplog.at_level(logging.WARNING, "realsys.cluster.stream"), pulling() as puller:
            dealer.connect(puller.address)
            header = msgspec.msgpack.encode(Push("stranger", 0, 0))
            for frames in (
                [b""],
                [b"\xff" * 100],
                [b"x", b"y", b"z"],
                [header],
                [header[:-1], *encode_group(make_group("t"))],
            ):
                dealer.send_multipart(frames)
            assert dealer.poll(BOUND_S * 1000)
            nack = msgspec.msgpack.decode(dealer.recv(), type=PushNack)
            puller.wait_until(lambda: puller.stats.malformed == 5)
    finally:
        context.destroy(linger=0)
    assert nack.sequence == 0  # the one whose header was readable
    assert "0 frames" in nack.reason
    assert puller.tickets == []
    assert "from localhost:" in caplog.text
