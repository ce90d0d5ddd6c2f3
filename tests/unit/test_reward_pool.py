"""The pool: real processes, whatever a verifier does."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from realsys.errors import RewardError
from realsys.reward.messages import Failed, Item, Results, frame
from realsys.reward.pool import VerifierPool

BEHAVE = "tests.unit.reward_verifiers:behave"


def with_pool(body, processes=1, timeout_s=5.0):
    """Run ``body(pool)`` on a pool that is closed afterwards; 60 s bound all of it."""

    async def run():
        pool = VerifierPool(processes, timeout_s)
        try:
            async with asyncio.timeout(60):
                return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


async def error_of(pool, answer, reference=""):
    with pytest.raises(RewardError) as caught:
        await pool.verify(BEHAVE, "", answer, reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_batch_gets_a_verdict_for_each_answer_in_order():
    async def body(pool):
        answers = ["7", "8", "7", ""]
        assert await pool.verify_batch(BEHAVE, [Item("", answer, "7") for answer in answers]) == [
            True,
            False,
            True,
            False,
        ]
        assert await pool.verify_batch(BEHAVE, []) == []
        assert await pool.verify("exact", "a1b2=", "#3", "3") is True
        assert pool.restarts == 0

    with_pool(body)


def test_a_hung_verifier_is_killed_and_replaced():
    async def body(pool):
        await pool.verify(BEHAVE, "", "a", "a")
        assert "no result within" in (message := await error_of(pool, "hang"))
        assert BEHAVE in message and "answer 1 of 1" in message
        assert await pool.verify(BEHAVE, "", "a", "a") is True
        assert pool.restarts == 1

    with_pool(body, timeout_s=1.5)


def test_a_dead_verifier_process_is_an_error_and_replaced():
    async def body(pool):
        assert "exit code 7" in await error_of(pool, "crash")
        assert await pool.verify(BEHAVE, "", "a", "a") is True
        assert pool.restarts == 1

    with_pool(body)


def test_an_exception_is_an_error_with_its_message_and_the_process_stays():
    async def body(pool):
        with pytest.raises(RewardError, match="answer 3 of 3: ArithmeticError: cannot tell"):
            await pool.verify_batch(BEHAVE, [Item("", answer, "a") for answer in ("a", "b", "raise")])
        assert "TypeError: returned None" in await error_of(pool, "none")
        assert "TypeError: returned nan" in await error_of(pool, "nan")
        assert len(await error_of(pool, "huge")) < 500
        assert "ValueError: \\ud800xxx" in await error_of(pool, "unspeakable")
        assert await pool.verify(BEHAVE, "", "a", "a") is True
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
def test_a_process_that_lacks_something_of_the_systems_is_replaced(answer, problem):
    """Else it would fail every answer from then on, and nothing would be trained any more."""

    async def body(pool):
        assert problem in await error_of(pool, answer)
        assert await pool.verify(BEHAVE, "", "a", "a") is True
        assert pool.restarts == 1

    with_pool(body, timeout_s=40.0)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("ignore SIGTERM", "no result within"),
        ("signal its group", "killed by SIGTERM"),
        ("exit", "exit code 0"),
        ("close everything", "died"),
    ],
)
def test_a_verifier_that_ends_or_stalls_its_process_harms_nobody_else(answer, problem):
    async def body(pool):
        assert await pool.verify(BEHAVE, "", "a", "a") is True  # loaded, so that the limit is that of an answer
        assert problem in await error_of(pool, answer)
        assert await pool.verify(BEHAVE, "", "a", "a") is True
        assert pool.restarts == 1

    with_pool(body, timeout_s=1.0)


def test_a_verifier_that_forks_gives_its_verdict_once():
    """The twin comes back into our code, with our socket: its verdict would be taken for that on the next answer."""

    async def body(pool):
        for _ in range(5):
            assert await pool.verify(BEHAVE, "", "fork", "") is True
            assert await pool.verify(BEHAVE, "", "b", "a") is False
        assert await pool.verify_batch(BEHAVE, [Item("", a, "a") for a in ("fork", "b", "fork", "b")]) == [
            True,
            False,
            True,
            False,
        ]
        assert pool.restarts == 0

    with_pool(body)


def test_what_a_verifier_started_dies_with_its_process(tmp_path):
    async def body(pool):
        assert await pool.verify(BEHAVE, "", "a", "a") is True
        assert "no result within" in await error_of(pool, "start", str(tmp_path / "pid"))

    with_pool(body, timeout_s=3.0)
    try:
        child = os.pidfd_open(int((tmp_path / "pid").read_text()))
    except ProcessLookupError:
        return  # collected already
    try:
        assert select.select([child], [], [], 10.0)[0], "what the verifier started outlived it by 10 s"
    finally:
        os.close(child)


def test_what_a_verifier_prints_is_logged_and_bounded(caplog):
    async def body(pool):
        assert await pool.verify(BEHAVE, "", "print", "") is True
        assert "it printed: this is what it said" not in await error_of(pool, "exit")

    with caplog.at_level("INFO"):
        with_pool(body)
    assert caplog.text.count("this is what it said") == 1


def reply_of(replies, items=2):
    """What a batch comes to when its process says these things."""

    async def body(pool):
        await pool.verify(BEHAVE, "", "a", "a")
        (process,) = pool._running
        for reply in replies:
            process._reader.feed_data(frame(reply))
        return await pool.verify_batch(BEHAVE, [Item("", "wait", "600")] * items)

    return with_pool(body)


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ([Results(1, [True, True])], "replied to batch 1, not 2"),  # late, or twice
        ([Results(2, [True, True, True])], "3 on 2 answers"),
        ([Results(2, [True]), Results(2, [])], "gave 0 verdicts more, 1 on 2 answers"),
        ([Failed(2, "x", [True, True])], "2 on 2 answers"),
    ],
)
def test_a_reply_that_does_not_fit_the_batch_is_an_error(replies, problem):
    with pytest.raises(RewardError, match=problem):
        reply_of(replies)


def test_a_verifier_that_cannot_be_loaded_is_an_error():
    async def body(pool):
        with pytest.raises(RewardError, match="cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"):
            await pool.verify("nowhere:verify", "", "a", "a")
        assert await pool.verify("exact", "", "#1", "1") is True

    with_pool(body)


def test_the_limit_is_per_answer_not_per_batch():
    async def body(pool):
        items = [Item("", "wait", "0.5")] * 5  # 2.5 s in all, the limit is 2 s
        assert await pool.verify_batch(BEHAVE, items) == [False] * 5

    with_pool(body, timeout_s=2.0)


def test_one_hung_verifier_does_not_hold_up_another_process():
    async def body(pool):
        hung = asyncio.create_task(error_of(pool, "hang"))
        assert await asyncio.gather(*(pool.verify(BEHAVE, "", "a", "a") for _ in range(3))) == [True] * 3
        assert not hung.done()
        await pool.close()
        assert "died" in await hung

    with_pool(body, processes=2, timeout_s=60.0)


def test_a_cancelled_call_does_not_leave_its_result_to_the_next():
    async def body(pool):
        assert await pool.verify(BEHAVE, "", "a", "a") is True
        call = asyncio.create_task(pool.verify(BEHAVE, "", "wait", "wait"))
        hang = asyncio.create_task(pool.verify(BEHAVE, "", "hang", ""))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        hang.cancel()
        await asyncio.gather(hang, return_exceptions=True)
        assert await pool.verify(BEHAVE, "", "b", "a") is False

    with_pool(body)


def test_close_ends_the_processes_and_what_waits_for_them():
    async def body(pool):
        await pool.verify(BEHAVE, "", "a", "a")
        (process,) = pool._running
        running = asyncio.create_task(error_of(pool, "hang"))
        waiting = asyncio.create_task(error_of(pool, "a"))
        await asyncio.sleep(0)
        await pool.close()
        assert "died" in await running
        assert await waiting == "the verifier pool is closed"
        assert process._popen.returncode == -signal.SIGKILL

    with_pool(body)


def test_verifier_processes_die_with_their_parent_even_while_they_hang():
    script = (
        "import asyncio\n"
        "from realsys.reward.pool import VerifierPool\n"
        "async def main():\n"
        "    pool = VerifierPool(1, 100.0)\n"
        f"    await pool.verify({BEHAVE!r}, '', 'a', 'a')\n"
        "    print(next(iter(pool._running))._popen.pid, flush=True)\n"
        f"    await pool.verify({BEHAVE!r}, '', 'hang', '')\n"
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


def test_nothing_heavy_is_imported():
    code = (
        "import sys, realsys.reward.pool, realsys.reward.process, realsys.data.check, realsys.rollout.worker_loop, "
        "realsys.rollout.partial, realsys.rollout.manager_client, realsys.data.arith, realsys.data.char_model\n"
        "print([name for name in ('torch', 'transformers', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
