"""The verifiers of a trial: a pool of processes, or the judge, which waits for its endpoint on the event loop."""

from __future__ import annotations

from typing import Protocol

from realsys.config.doors import JUDGE
from realsys.config.evaluation_sets import verifier_arguments
from realsys.config.schema import Config
from realsys.reward.pool import VerifierPool
from realsys.reward.verifier_process import Limits
from realsys.reward.verifiers.base import Item, Verdict


class Verifiers(Protocol):
    """Judges of completions, for one event loop.

    ``waiting``: items that wait to be begun. ``undecided``: items without a verdict since the start.
    """

    @property
    def waiting(self) -> int: ...

    @property
    def undecided(self) -> int: ...

    def take_failures(self) -> dict[str, int]:
        """Return the items since the last call without a verdict or over a limit, by cause."""
        ...

    async def verify(self, name: str, item: Item) -> Verdict:
        """Judge one completion. Raises RewardError if it has no verdict, NoVerifierError or StuckError if none has."""
        ...

    async def check_answer(self, name: str, item: Item) -> str | None:
        """Return why the row of an item, which has no completion, cannot be judged; None if it can."""
        ...

    async def close(self) -> None: ...


def open_verifiers(config: Config, *, processes: int = 0, sharers: int = 1) -> Verifiers:
    """Open what ``data.verifier`` names. ``processes``: verifier processes; 0: rollout.reward.processes.

    ``sharers``: processes of the trial that share the limits of a judge. Raises ConfigError.
    """
    data, reward = config.data, config.rollout.reward
    if data.verifier in JUDGE.builtin:
        judge: Verifiers = JUDGE.load(data.verifier)(config, sharers)
        return judge
    return VerifierPool(processes or reward.processes, Limits.of(reward), verifier_arguments(config))
