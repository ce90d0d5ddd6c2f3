"""A world of reward services around a Dispatch, whose every event a test chooses; it checks the invariants."""

from random import Random

from realsys.reward.dispatch import JUDGEMENTS, WINDOW, Dispatch, DispatchBounds
from realsys.reward.verifier_protocol import DIED, RAISED, Decided, NoVerdict, NoVerifier, VerifierWork
from realsys.reward.verifiers.contract import Verdict

RETRY_S, TOTAL_S = 60.0, 600.0
RIGHT = Verdict(correct=True)
FAILED = NoVerdict(RAISED, "it raised")
UNABLE = NoVerifier("it cannot judge")
EXACT = VerifierWork("exact")


class World:
    """Items 0, 1, ... and services of any names. ``ends``: item -> outcome; None if it was dropped."""

    def __init__(self, *names: str, seed: int = 0) -> None:
        self.now = 100.0
        self.dispatch = Dispatch(DispatchBounds(RETRY_S, TOTAL_S), Random(seed), self.now)
        self.ends = {}
        self.failed_at: dict[int, list[str]] = {}  # item -> services that gave no verdict
        self.lost_at: dict[int, set[str]] = {}  # item -> services that were lost or unable while they had it
        self.added = 0
        self.register(*names)

    @property
    def sends(self):
        """Requests that have not ended, by number."""
        return self.dispatch._sends

    def register(self, *names: str, incarnation: str = "1") -> None:
        self.names = set(names)
        self.dispatch.registered({name: (f"http://{name}", incarnation) for name in names})

    def add(self, count: int = 1, work: VerifierWork = EXACT, size: int = 10) -> None:
        for _ in range(count):
            self.dispatch.add(self.added, work, b"x" * size, self.now)
            self.added += 1

    def take(self):
        """Make the requests that are due, and check them."""
        new = self.dispatch.take(self.now)
        for send in new:
            instance = send.instance
            assert instance.blocked_until <= self.now, "left-alone"
            assert 0 < instance.outstanding <= WINDOW, "bounded-window"
            for entry in send.entries.values():
                assert entry.number not in self.ends, "one-end"
                failed_at = self.failed_at.get(entry.number, [])
                assert len(failed_at) < JUDGEMENTS
                avoided = self.lost_at.get(entry.number, set()).union(failed_at)
                others = (each for each in self.dispatch._instances.values() if each.name not in avoided)
                if instance.name in avoided:
                    assert all(other.is_away(self.now) for other in others), "another-service"
        self._check()
        return new

    def items(self, send) -> list[int]:
        return [entry.number for entry in send.entries.values()]

    def decide(self, send, outcome, count: int | None = None, *, over_limit: bool = False):
        """Let the service of a Send decide its first ``count`` items, or all."""
        indexes = list(send.entries)[:count]
        for number in (send.entries[index].number for index in indexes):
            if isinstance(outcome, NoVerdict):
                self.failed_at.setdefault(number, []).append(send.instance.name)
            elif outcome is UNABLE:
                self.lost_at.setdefault(number, set()).add(send.instance.name)
        self._settle(
            self.dispatch.decided(send.number, [Decided(i, outcome, over_limit) for i in indexes], self.now), outcome
        )

    def lose(self, send, *, died: bool = True) -> None:
        for item in self.items(send):
            self.lost_at.setdefault(item, set()).add(send.instance.name)
        self._settle(self.dispatch.lost(send.number, "connection failed", self.now, died=died), DIED)

    def refuse(self, send, retry_after_s: float = 1.0) -> None:
        self.dispatch.refused(send.number, retry_after_s, "full", self.now)
        self._check()

    def reject(self, send) -> None:
        self._settle(self.dispatch.rejected(send.number, "wrong token"), "rejected")

    def drop(self, item: int) -> int | None:
        """A caller is cancelled. Returns the Send that is aborted."""
        aborted = self.dispatch.drop(item)
        self.ends.setdefault(item, None)
        self._check()
        return aborted

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._settle(self.dispatch.expire(self.now), "waited")

    def finish(self, steps: int = 1000) -> None:
        """Let all services work, as long as anything is left to do."""
        for _ in range(steps):
            for send in [*self.take(), *self.sends.values()]:
                if send.number in self.sends:
                    self.decide(send, RIGHT)
            if len(self.ends) == self.added:
                return
            due = self.dispatch.due(self.now)
            assert due is not None, "an item is left that nothing will wake"
            self.pass_time(max(0.0, due - self.now))
        raise AssertionError(f"{self.added - len(self.ends)} items never end")

    def _settle(self, settled, cause) -> None:
        for end in settled:
            assert end.number not in self.ends, f"one-end: item {end.number} ended twice ({cause})"
            self.ends[end.number] = end.outcome
        self._check()

    def _check(self) -> None:
        """Every item that has not ended is in one lot or in one Send."""
        lots = [e.number for lot in self.dispatch._lots.values() for e in lot if not e.gone]
        held = [e.number for send in self.dispatch._sends.values() for e in send.entries.values() if not e.gone]
        assert sorted(lots + held) == sorted(set(range(self.added)) - self.ends.keys())
        assert self.dispatch.waiting == len(lots)
        for instance in self.dispatch._instances.values():
            sends = [send for send in self.sends.values() if send.instance is instance]
            assert instance.outstanding == sum(len(send.entries) for send in sends)
            assert instance.trial in (-1, *(send.number for send in sends))
