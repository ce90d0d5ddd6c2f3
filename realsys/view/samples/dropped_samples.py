"""Groups that RolloutWorkers dropped or that failed, with the reason of each (``rollout.stores.dropped_store``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RecordError
from realsys.rollout.stores.dropped_store import DroppedEpisode, DroppedGroup, group_files, read_group
from realsys.view.samples.base import SampleRow, SampleView, Turn
from realsys.view.samples.turns import turns

MOST_GROUPS = 1000


class DroppedSource:
    """The newest groups of all workers. A sample is an episode."""

    def __init__(self, root: Path, tokenizer: TextTokenizer) -> None:
        """``root``: ``paths.dropped``. A group is left out if its worker removes it during the read."""
        self._tokenizer = tokenizer
        self._places: dict[str, tuple[Path, int]] = {}  # sample id -> file, place of the episode in it
        self._rows: list[SampleRow] = []
        self._reasons: Counter[str] = Counter()
        for path in group_files(root)[:MOST_GROUPS]:
            try:
                self._add(path, read_group(path))
            except RecordError:
                continue

    @property
    def title(self) -> str:
        if not self._reasons:
            return "no dropped or failed group"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common(5))
        return f"newest dropped and failed groups: {reasons}"

    def rows(self) -> Sequence[SampleRow]:
        return self._rows

    def text(self, sample_id: str) -> str:
        group, episode = self._read(sample_id)
        return f"{group.prompt}\n{episode.error}\n{''.join(turn.text for turn in self._turns(episode))}"

    def view(self, sample_id: str) -> SampleView:
        group, episode = self._read(sample_id)
        row = next(row for row in self._rows if row.sample_id == sample_id)
        made = self._turns(episode) or [Turn("prompt", [group.prompt])]
        return SampleView(row, made, facts(group, episode), group.reference)

    def _add(self, path: Path, group: DroppedGroup) -> None:
        ticket = group.ticket
        self._reasons[_short(group.reason) or "with failed episodes"] += 1
        for place, episode in enumerate(group.episodes):
            name = f"{ticket.ticket_id}.{ticket.attempt}/{episode.number}"
            if name in self._places:
                continue
            self._places[name] = (path, place)
            lengths = [len(row.logprobs) // 4 for row in episode.rows]
            reasons = [row.finish_reason for row in episode.rows]
            self._rows.append(
                SampleRow(
                    sample_id=name,
                    group=ticket.ticket_id,
                    prompt_index=ticket.prompt_index,
                    reward=episode.reward,
                    correct=episode.correct,
                    tokens=sum(lengths),
                    truncated=any(reason != "stop" for reason in reasons),
                    finish_reason=next((reason for reason in reasons if reason != "stop"), "stop"),
                    outcome=_short(episode.error) or _short(group.reason) or "trained",
                )
            )

    def _read(self, sample_id: str) -> tuple[DroppedGroup, DroppedEpisode]:
        if sample_id not in self._places:
            raise RecordError(f"no dropped or failed sample {sample_id!r}")
        path, place = self._places[sample_id]
        group = read_group(path)
        return group, group.episodes[place]

    def _turns(self, episode: DroppedEpisode) -> list[Turn]:
        return [turn for row in episode.rows for turn in turns(row.arrays(), 0, self._tokenizer)]


def facts(group: DroppedGroup, episode: DroppedEpisode) -> list[tuple[str, str]]:
    """Return the facts of an episode as (name, value), for people."""
    parts = [("error", episode.error)] if episode.error else []
    parts.append(("group", group.reason or "trained without its failed episodes"))
    if not episode.rows:
        parts.append(("tokens", "not kept: the group was too large, or the engine returned none"))
    ticket = group.ticket
    parts.append(("worker", f"{group.worker}, {datetime.fromtimestamp(group.time):%Y-%m-%d %H:%M:%S}"))
    parts.append(("ticket", f"{ticket.ticket_id}, attempt {ticket.attempt}, granted at v{ticket.version}"))
    parts.append(("prompt", f"{ticket.prompt_index}, seed {ticket.seed}"))
    return parts


def _short(reason: str) -> str:
    """Return the first line of a reason, short enough for a list."""
    line = reason.strip().split("\n", 1)[0]
    return line if len(line) <= 80 else line[:79] + "…"
