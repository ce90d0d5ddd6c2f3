"""The pool: real processes, whatever a verifier does."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest
import uvloop

from realsys.config.schema_rollout import RewardConfig
from realsys.errors import NoVerifierError, RewardError
from realsys.reward import pool
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifier_protocol import MAX_ITEMS, BatchDone, Loaded, line
from realsys.reward.verifiers.contract import Item, Verdict
from tests.support.serving.reward_pools import BEHAVE, correct, error_of, outcomes, trips, until, with_pool

pytestmark = pytest.mark.processes


def test_items_of_one_turn_share_a_trip():
    async def body(pool):
        await correct(pool, "a")
        before = trips(pool)
        await outcomes(pool, [Item("", "a", "a")] * MAX_ITEMS)
        assert trips(pool) == before + 1
        await outcomes(pool, [Item("", "a", "a")] * (MAX_ITEMS + 1))
        assert trips(pool) == before + 3

    with_pool(body)


def test_verifier_without_any_verdict_is_to_blame(monkeypatch):
    """Otherwise groups would be trained with their cut-off completions only, and nothing would say so."""
    monkeypatch.setattr(pool, "HOPELESS", 4)

    async def body(pool):
        failing = [Item("", "raise", "")] * 3
        kinds = {type(error) for error in await outcomes(pool, failing)}
        assert kinds == {RewardError}
        assert await correct(pool, "a")
        first = [type(error) for error in await outcomes(pool, [*failing, *failing])]
        assert first == [RewardError] * 3 + [NoVerifierError] * 3
        assert "7 completions in a row had no verdict" in await error_of(pool, "raise")
        assert await correct(pool, "a")
        assert "in a row" not in await error_of(pool, "raise")

    with_pool(body)


def test_items_are_shared_between_processes():
    """One process must not take all of them: each is slow, and the others would have nothing to do."""

    async def body(pool):
        pids = await outcomes(pool, [Item("", "process", "")] * 8)
        assert len({verdict.reward for verdict in pids}) == 2

    with_pool(body, processes=2)


def test_verifiers_take_turns_in_the_queue():
    async def body(pool):
        order = []

        async def ask(name, completion, answer):
            await pool.verify(name, Item("", completion, answer))
            order.append(name)

        await asyncio.gather(*(ask(BEHAVE, "a", "a") for _ in range(2 * MAX_ITEMS)), ask("exact", "#1", "1"))
        assert order.index("exact") == MAX_ITEMS

    with_pool(body)


def test_second_judgement_waits_behind_all_others():
    """A verifier that hangs on one completion must not delay the others twice."""

    async def body(pool):
        await correct(pool, "a")
        order = []

        async def ask(completion):
            await asyncio.gather(pool.verify(BEHAVE, Item("", completion, "")), return_exceptions=True)
            order.append(completion)

        await asyncio.gather(ask("raise"), *(ask(str(k)) for k in range(2 * MAX_ITEMS)))
        assert order[-1] == "raise"

    with_pool(body)


@pytest.mark.parametrize(
    ("used", "left", "reached"),
    [((0.0, 0.0), 2.0, ""), ((1.5, 3.0), 0.5, ""), ((2.0, 3.0), 0.0, "2 s of CPU time"), ((0.1, 6.0), 0.0, "6 s")],
)
def test_limits_of_one_item(used, left, reached):
    limits = ItemLimits.of(RewardConfig(timeout_s=2.0, elapsed_timeout_s=6.0))
    assert limits.left_s(*used) == pytest.approx(left)
    if reached:
        assert limits.reached(used[0]) == reached


def test_process_that_cannot_start_is_an_error(monkeypatch):
    async def body(pool):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/python")
            assert "cannot be started" in await error_of(pool, "a")
        assert await correct(pool, "a") is True

    with_pool(body)


def test_limit_is_per_item_not_per_trip():
    async def body(pool):
        verdicts = await outcomes(pool, [Item("", "wait", "0.5")] * 5)  # 2.5 s in all, the limit is 2 s
        assert [verdict.correct for verdict in verdicts] == [False] * 5

    with_pool(body, timeout_s=2.0)


def test_verdicts_arrive_while_later_items_run():
    async def body(pool):
        first = asyncio.create_task(correct(pool, "a"))
        second = asyncio.create_task(pool.verify(BEHAVE, Item("", "wait", "1")))
        third = asyncio.create_task(error_of(pool, "hang"))
        assert await first is True and (await second).correct is False
        assert not third.done()
        await pool.close()
        assert "died" in await third

    with_pool(body, timeout_s=5.0)


def test_wait_for_a_dying_process_blocks_nothing():
    """A process that closes its socket and lives on is waited for, while other coroutines run."""

    async def body(pool):
        await correct(pool, "a")
        (child,) = pool._running
        waiting = asyncio.create_task(child.process.exits_within(60.0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done() and await child.process.exits_within(0.01) is False
        os.kill(child.process.pid, signal.SIGKILL)
        assert await waiting is True

    with_pool(body)


def test_pool_works_on_uvloop():
    async def run():
        pool = VerifierPool(1, ItemLimits(5.0, 5.0))
        try:
            async with asyncio.timeout(60):
                assert "exited with code 7" in await error_of(pool, "crash")
                assert await correct(pool, "a") is True
        finally:
            await pool.close()

    uvloop.run(run())


def test_nothing_heavy_is_imported():
    code = (
        "import sys, realsys.reward.pool, realsys.reward.verifier_main, realsys.data.check, "
        "realsys.rollout.worker_loop, realsys.rollout.resumable_engine, "
        "realsys.manager.client, realsys.data.arith\n"
        "print([name for name in ('torch', 'transformers', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# ---- Completions without a verdict or over a limit: each is counted by its cause, and costs no other completion


CHECKED = "tests.support.serving.reward_verifiers:checked"


def test_limit_that_nothing_keeps_is_an_error(monkeypatch):
    """Else a limit that is too low would make every completion wrong."""
    monkeypatch.setattr(pool, "HOPELESS", 2)

    async def body(pool):
        await pool.verify(CHECKED, Item("", "a", "a"))
        calls = (pool.verify(CHECKED, Item("", "spin", "a")) for _ in range(2))
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert first == Verdict(correct=False) and isinstance(second, NoVerifierError)
        assert "2 completions in a row had no verdict" in str(second)

    with_pool(body, timeout_s=30.0, cpu_s=0.3)


def test_hung_completion_is_never_wrong():
    """Time on the clock depends on the machine, so it says nothing about the completion."""

    async def body(pool):
        await pool.verify(CHECKED, Item("", "a", "a"))
        with pytest.raises(RewardError, match="no result within 1.1 s"):
            await pool.verify(CHECKED, Item("", "hang", ""))
        assert pool.take_failures() == {"elapsed": 1}

    with_pool(body, timeout_s=1.0, cpu_s=30.0)


def test_endless_expression_is_wrong_for_math():
    async def body(pool):
        await pool.verify("math", Item("", "5", "5"))
        items = [Item("", text, "5") for text in ("5", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}")]
        verdicts = await asyncio.gather(*(pool.verify("math", item) for item in items))
        assert [verdict.correct for verdict in verdicts] == [True, False, True]
        assert (pool.take_failures(), pool.undecided) == ({"cpu_time": 1}, 0)

    with_pool(body, timeout_s=55.0, cpu_s=1.0)


# ---- Verifiers that hang, die, fork, print or take all of a resource: each costs its own completion only


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
    [("ignore SIGTERM", "no result within"), ("signal its group", "killed by SIGTERM"), ("exit", "exited with code 0")],
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
        child = os.pidfd_open(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate(timeout=60)
    try:
        assert select.select([child], [], [], 60.0)[0], "the verifier process outlived its parent by 60 s"
    finally:
        os.close(child)
