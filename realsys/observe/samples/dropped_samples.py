"""Groups that were not trained, with the reason of each: RolloutWorkers dropped them, they failed, or they were too old
for the trainer (``realsys.observe.dropped_groups``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from realsys.algorithm.token_losses import MASKED, STALE
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import RecordError
from realsys.observe.dropped_groups import DroppedEpisode, DroppedGroup, GroupFile, group_files, read_group
from realsys.observe.samples.filters import PROMPT_END, SampleRow, SampleView, Turn
from realsys.observe.samples.turns import References, turns

MOST_GROUPS = 1000
MOST_BYTES = 256 << 20  # bytes of files that the first list reads

#: reason of the trainer -> explanation
_EXPLAINED = {
    STALE: "too old when it arrived, or by its turn; its prompt was issued again",
    MASKED: "all of its tokens were too old to be trained",
}


@dataclass(frozen=True, slots=True)
class _Listed:
    """A group without its tokens."""

    reason: str
    prompt: str  # its end
    rows: list[SampleRow]


class DroppedSource:
    """The newest groups of all processes. A sample is an episode."""

    def __init__(self, root: Path, tokenizer: TextTokenizer, references: References) -> None:
        """``root``: ``paths.dropped``."""
        self._root = root
        self._tokenizer = tokenizer
        self._references = references
        self._groups: dict[GroupFile, _Listed] = {}
        self._places: dict[str, tuple[GroupFile, int]] = {}  # sample id -> file, place of the episode in it
        self._rows: list[SampleRow] = []
        self._open: tuple[GroupFile, DroppedGroup] | None = None  # the group that was read last
        self._refresh()

    @property
    def title(self) -> str:
        reasons = Counter(listed.reason for listed in self._groups.values())
        if not reasons:
            return "no dropped or failed group is kept"
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(5))
        return f"newest groups that were not trained: {counted}"

    def rows(self) -> Sequence[SampleRow]:
        """Return the samples as they are on disk now."""
        self._refresh()
        return self._rows

    def prompt(self, sample_id: str) -> str:
        return self._groups[self._places[sample_id][0]].prompt

    def text(self, sample_id: str) -> str:
        """Return prompt, reason and tokens as text; "" if its process has removed the group since the last list."""
        try:
            group, episode = self._read(sample_id)
        except RecordError:
            return ""
        tokens = [self._tokenizer.decode(np.frombuffer(row.tokens, np.int32).tolist()) for row in episode.rows]
        return "\n".join([group.prompt, reason_of(group), episode.error, *tokens])

    def view(self, sample_id: str) -> SampleView:
        group, episode = self._read(sample_id)
        row = next(row for row in self._rows if row.sample_id == sample_id)
        made = [turn for kept in episode.rows for turn in turns(kept.arrays(), 0, self._tokenizer)]
        reference, note = group.reference, ""
        if reference is None:
            reference, note = self._references.find(group.ticket.split, group.ticket.prompt_index)
        return SampleView(row, made or [Turn("prompt", [group.prompt])], facts(group, episode), reference, note)

    def _refresh(self) -> None:
        """Read the groups that were added, and forget those that were removed. A file that cannot be read is left
        out: its process may remove it at any moment.
        """
        before, self._groups, size = self._groups, {}, 0
        for file in group_files(self._root)[:MOST_GROUPS]:
            size += file.size
            if size > MOST_BYTES and self._groups:
                break
            try:
                self._groups[file] = before.get(file) or _listed(read_group(file.path))
            except RecordError:
                continue
        self._places, self._rows = {}, []
        for file, listed in self._groups.items():
            for place, row in enumerate(listed.rows):
                if row.sample_id not in self._places:
                    self._places[row.sample_id] = (file, place)
                    self._rows.append(row)

    def _read(self, sample_id: str) -> tuple[DroppedGroup, DroppedEpisode]:
        if sample_id not in self._places:
            raise RecordError(f"no dropped or failed group has sample {sample_id!r}")
        file, place = self._places[sample_id]
        if self._open is None or self._open[0] != file:
            self._open = (file, read_group(file.path))
        group = self._open[1]
        return group, group.episodes[place]


def reason_of(group: DroppedGroup) -> str:
    """Return why a group was not trained, short enough for a list."""
    if group.next_version is not None:
        return f"too old ({group.reason})"
    return _short(group.reason) or "with failed episodes"


def _listed(group: DroppedGroup) -> _Listed:
    return _Listed(reason_of(group), group.prompt[-PROMPT_END:], [_row(group, episode) for episode in group.episodes])


def _row(group: DroppedGroup, episode: DroppedEpisode) -> SampleRow:
    # A group with failed episodes may be dropped again, by the trainer, and its episodes have other numbers then.
    in_trainer = ".0" if group.next_version is not None else ""
    return SampleRow(
        sample_id=f"{group.ticket.unit}/{episode.number}{in_trainer}",
        group=group.ticket.ticket_id,
        prompt_index=group.ticket.prompt_index,
        reward=episode.reward,
        correct=episode.correct,
        tokens=episode.tokens,
        truncated=episode.finish_reason != "stop",
        finish_reason=episode.finish_reason,
        staleness=_staleness(group, episode),
        outcome=_short(episode.error) or (reason_of(group) if group.reason else "trained"),
    )


def _staleness(group: DroppedGroup, episode: DroppedEpisode) -> int | None:
    if group.next_version is None or episode.versions is None:
        return None
    return group.next_version - episode.versions[0]


def facts(group: DroppedGroup, episode: DroppedEpisode) -> list[tuple[str, str]]:
    """Return the facts of an episode as (name, value), for people."""
    parts = [("error", episode.error)] if episode.error else []
    parts.append(("group", group.reason or "trained without its failed episodes"))
    if group.next_version is not None:
        parts[-1] = ("group", f"{group.reason}: {_EXPLAINED.get(group.reason, 'too old')}")
    if episode.versions is not None:
        oldest, newest = episode.versions
        sampled = f"v{oldest}" if oldest == newest else f"v{oldest} to v{newest}"
        staleness = _staleness(group, episode)
        behind = (
            "" if staleness is None else f"; the next batch trains on top of v{group.next_version}: {staleness} behind"
        )
        parts.append(("versions", f"sampled by {sampled}{behind}"))
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
