"""Waiting of a program: the machine's fault, or its own."""

from realsys.reward.sandbox.inside.zygote import ThreadUse, Waiting

ASLEEP = ThreadUse(False, 0.0, 0.0)


def waiting(*looks, last_pids=None) -> Waiting:
    """Return it after looks, one each second."""
    found = Waiting(0.0)
    for second, tasks in enumerate(looks, 1):
        found.look(float(second), dict(enumerate(tasks)), last_pids[second - 1] if last_pids else 7)
    return found


def test_waiting_of_one_thread_is_free():
    """The first process only waits for the second, as with a command, or a program that waits for another."""
    found = waiting([ASLEEP, ThreadUse(True, 0.25, 0.75)], [ASLEEP, ThreadUse(True, 0.75, 1.25)])
    assert found.waited_s == 1.25


def test_waiting_for_own_children_counts():
    looks = (
        [ThreadUse(True, 0.1, 0.0)],
        [ThreadUse(True, 0.2, 0.9), ThreadUse(True, 0.1, 0.0)],
        [ThreadUse(True, 0.3, 1.8)],
    )
    found = waiting(*looks, last_pids=[7, 8, 9])
    assert found.waited_s == 0.0


def test_waiting_of_several_threads_is_free_once():
    looks = [[ThreadUse(True, 0.25 * n, 0.5 * n), ThreadUse(True, 0.0, 0.75 * n)] for n in (1, 2)]
    assert waiting(*looks, last_pids=[0, 0]).waited_s == 1.5


def test_waiting_while_its_threads_run_counts():
    looks = [[ThreadUse(True, 1.0 * n, 0.0), ThreadUse(True, 0.0, 1.0 * n)] for n in (1, 2)]
    assert waiting(*looks, last_pids=[0, 0]).waited_s == 0.0


def test_sleep_is_no_waiting():
    assert waiting([ASLEEP], [ASLEEP]).waited_s == 0.0


def test_each_run_has_its_own_waiting():
    found = waiting([ThreadUse(True, 0.0, 1.0)])
    found.begin()
    assert (found.run_s, found.waited_s) == (0.0, 1.0)


def test_time_that_the_host_takes_away_is_free():
    """The thread that ran for 0.4 s had a processor for no longer; on another processor nothing was missing."""
    found = Waiting(0.0)
    found.look(1.0, {0: ThreadUse(True, 0.5, 0.25)}, 7, (10.0, 20.0))
    assert found.waited_s == 0.25
    found.look(2.0, {0: ThreadUse(True, 0.9, 0.25)}, 7, (10.5, 20.0))
    assert found.waited_s == 0.75
    found.look(3.0, {0: ThreadUse(True, 1.8, 0.25)}, 7, (11.5, 20.0))
    assert round(found.waited_s, 9) == 0.85, "no more than the time in which it did not run"
