"""Verifiers that hang, die, fork, print or take all of a resource: each costs its own completion only."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from realsys.errors import RewardError
from realsys.reward.verifier_protocol import BatchDone, Loaded, line
from realsys.reward.verifiers.contract import Item, Verdict
from tests.support.serving.reward_pools import BEHAVE, correct, error_of, outcomes, until, with_pool

pytestmark = pytest.mark.processes


def test_hung_verifier_is_killed_and_replaced():
    async def body(pool):
        await correct(pool, "a")
        assert "no result within" in (message := await error_of(pool, "hang"))
        assert BEHAVE in message
        assert await correct(pool, "a") is True
        assert (pool.restarts, pool.undecided) == (2, 1)  # it was judged again once

    with_pool(body, timeout_s=1.0)


def test_dead_process_is_an_error_and_replaced():
    async def body(pool):
        assert "exited with code 7" in await error_of(pool, "crash")
        assert await correct(pool, "a") is True
        assert pool.restarts == 2

    with_pool(body)


@pytest.mark.parametrize(
    ("bad", "problem", "restarts"),
    [
        ("raise", "ArithmeticError: cannot tell", 0),
        ("none", "TypeError: returned None", 0),
        ("memory", "MemoryError", 1),
        ("crash", "exited with code 7", 1),
        ("hang", "no result within", 1),
    ],
)
def test_undecidable_item_fails_alone(bad, problem, restarts, tmp_path):
    """Items before and behind it have verdicts, and each of them was judged once; it was judged twice."""
    noted = tmp_path / "noted"

    async def body(pool):
        await correct(pool, "a")  # the verifier is loaded, so the time limit is that of an item
        items = [Item(str(k), "note", str(noted)) for k in range(16)]
        items[4] = items[11] = Item("", bad, "")
        results = await outcomes(pool, items)
        for k, result in enumerate(results):
            if k in (4, 11):
                assert isinstance(result, RewardError) and problem in str(result) and BEHAVE in str(result)
            else:
                assert result == Verdict(correct=True)
        assert (pool.restarts, pool.undecided, pool.waiting) == (2 * 2 * restarts, 2, 0)

    with_pool(body, timeout_s=1.0 if bad == "hang" else 50.0)
    assert noted.read_text().split() == [str(k) for k in range(16) if k not in (4, 11)]


def test_limit_counts_cpu_time_not_load():
    """On a machine with other load a verifier takes longer; only what it uses itself counts."""

    async def body(pool):
        await correct(pool, "a")
        assert await correct(pool, "wait", "0.6") is False  # it waited, and used next to nothing
        assert "no result within 0.33 s of CPU time" in await error_of(pool, "spin")

    with_pool(body, timeout_s=30.0, cpu_s=0.3)


def test_process_killed_between_items_fails_nothing():
    async def body(pool):
        await correct(pool, "a")
        (child,) = pool._running
        os.kill(child.process.pid, signal.SIGKILL)
        await until(child.has_ended)
        assert await correct(pool, "a") is True
        assert pool.restarts == 1

    with_pool(body)


def test_exception_is_an_error_and_the_process_stays():
    async def body(pool):
        assert "TypeError: returned None" in await error_of(pool, "none")
        assert "ValueError: returned nan" in await error_of(pool, "nan")
        assert len(await error_of(pool, "huge")) < 500
        assert "ValueError: \\ud800xxx" in await error_of(pool, "unspeakable")
        assert await correct(pool, "a") is True
        assert pool.restarts == 0

    with_pool(body)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("memory", "MemoryError"),
        ("open sockets", "Too many open files"),
        ("fill the disk", "File too large"),
        ("print without end", "File too large"),
    ],
)
def test_process_without_system_resources_is_replaced(answer, problem):
    """Else it would fail every answer from then on, and nothing would be trained any more."""

    async def body(pool):
        assert problem in await error_of(pool, answer)
        assert await correct(pool, "a") is True
        assert pool.restarts == 2

    with_pool(body, timeout_s=40.0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("ignore SIGTERM", "no result within"),
        ("signal its group", "killed by SIGTERM"),
        ("exit", "exited with code 0"),
    ],
)
def test_verifier_that_ends_its_process_harms_no_other(answer, problem):
    async def body(pool):
        assert await correct(pool, "a") is True  # loaded, so that the limit is that of an answer
        assert problem in await error_of(pool, answer)
        assert await correct(pool, "a") is True
        assert pool.restarts == 2

    with_pool(body, timeout_s=1.0 if answer == "ignore SIGTERM" else 50.0)


def test_verdict_stands_though_the_process_cannot_report():
    async def body(pool):
        assert await correct(pool, "close everything") is False
        assert await correct(pool, "a") is True
        assert pool.restarts == 1

    with_pool(body)


def test_a_verifier_that_forks_gives_its_verdict_once():
    """The forked process returns into our code with our socket: its verdict would count for the next item."""

    async def body(pool):
        for _ in range(5):
            assert await correct(pool, "fork", "") is True
            assert await correct(pool, "b") is False
        verdicts = await outcomes(pool, [Item("", completion, "a") for completion in ("fork", "b", "fork", "b")])
        assert [verdict.correct for verdict in verdicts] == [True, False, True, False]
        assert pool.restarts == 0

    with_pool(body)


FORKED_WRITER = """
import os
from realsys.reward.verifier_protocol import JournalReader, JournalWriter

reader = JournalReader()
writer = JournalWriter(os.dup(reader.descriptor))
if os.fork() == 0:
    writer.append(b'["verdict"]' + bytes([10]))
    os._exit(0)
_, status = os.wait()
print(os.WIFSIGNALED(status), reader.read(0, 1))
"""


def test_forked_process_cannot_write_outcomes():
    done = subprocess.run([sys.executable, "-c", FORKED_WRITER], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True []\n"


def test_what_a_verifier_started_dies_with_its_process(tmp_path):
    async def body(pool):
        assert await correct(pool, "a") is True
        assert "no result within" in await error_of(pool, "start", str(tmp_path / "pid"))

    with_pool(body, timeout_s=3.0)
    try:
        child = os.pidfd_open(int((tmp_path / "pid").read_text()))
    except ProcessLookupError:
        return  # collected already
    try:
        assert select.select([child], [], [], 60.0)[0], "what the verifier started outlived it by 60 s"
    finally:
        os.close(child)


def test_what_a_verifier_prints_is_logged_and_bounded(caplog):
    async def body(pool):
        assert await correct(pool, "print", "") is True
        assert "it printed: this is what it said" not in await error_of(pool, "exit")

    with caplog.at_level("INFO"):
        with_pool(body)
    assert caplog.text.count("this is what it said") == 1


def first_problem_after(caplog, *replies):
    """Return the log of a process that says these things before it has judged the first of two items."""

    async def body(pool):
        await correct(pool, "a")  # batch 1 loads the verifier, batch 2 is this item
        (child,) = pool._running
        for reply in replies:
            child._reader.feed_data(line(reply))
        # The first item takes a while: the process must not have judged it before the reply is read.
        first, second = await outcomes(pool, [Item("", "wait", "0.5"), Item("", "a", "a")])
        assert (first, second) == (Verdict(correct=False), Verdict(correct=True))
        assert (pool.restarts, pool.undecided) == (1, 0)
        return caplog.text

    return with_pool(body)


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ([BatchDone(2, 2)], "replied to batch 2, not 3"),  # late, or twice
        ([BatchDone(3, 3)], "after 0 of 2 outcomes"),
        ([BatchDone(3, 0)], "after 0 of 2 outcomes"),
        ([BatchDone(3, 2)], "has 0 outcomes, must have 2 to 2"),
        ([Loaded(3, "x")], "after 0 of 2 outcomes"),
    ],
)
def test_reply_that_does_not_fit_costs_no_verdict(replies, problem, caplog):
    assert problem in first_problem_after(caplog, *replies)


def test_hung_verifier_does_not_delay_another_process():
    async def body(pool):
        hung = asyncio.create_task(error_of(pool, "hang"))
        await asyncio.sleep(0)
        await until(lambda: not pool.waiting)  # a process has taken it
        assert await asyncio.gather(*(correct(pool, "a") for _ in range(3))) == [True] * 3
        assert not hung.done()
        await pool.close()
        assert "died" in await hung

    with_pool(body, processes=2, timeout_s=60.0)


def test_hanging_verifier_process_dies_with_its_parent():
    script = (
        "import asyncio\n"
        "from realsys.reward.pool import ItemLimits, VerifierPool\n"
        "from realsys.reward.verifiers.contract import Item\n"
        "async def main():\n"
        "    pool = VerifierPool(1, ItemLimits(100.0, 100.0))\n"
        f"    await pool.verify({BEHAVE!r}, Item('', 'a', 'a'))\n"
        "    print(next(iter(pool._running)).process.pid, flush=True)\n"
        f"    await pool.verify({BEHAVE!r}, Item('', 'hang', ''))\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate(timeout=60)
    try:
        assert select.select([child], [], [], 60.0)[0], "the verifier process outlived its parent by 60 s"
    finally:
        os.close(child)
