"""Samples as lines on a terminal. A completion is untrusted: ``printable`` escapes what could control the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from realsys.observe.evaluation_records import EvalSample
from realsys.view.samples.base import SampleView
from realsys.view.samples.step_samples import VERDICTS, Sample

_COLOURS = {True: "green", False: "red", None: "default"}
_STYLES = ("cyan", "yellow", "magenta", "green", "blue")  # versions take them in turn


def group_lines(group: Sequence[Sample]) -> Iterator[Text]:
    """Yield the lines for a prompt of a train step and its episodes."""
    first = group[0]
    yield Text()
    yield Text(
        f"ticket {first.ticket_id} attempt {first.attempt}: prompt {first.prompt_index}, seed {first.seed}, granted at "
        f"v{first.granted_version}, {first.worker}, {first.seconds:.2f} s",
        style="bold",
    )
    yield Text("prompt     ").append(printable(first.prompt))
    if first.reference is not None:
        yield Text("reference  ").append(printable(first.reference))
    for sample in group:
        if sample.prompt != first.prompt:  # a row that begins with another history
            yield Text("  from  ").append(printable(sample.prompt), style="dim")
        yield _facts(sample)
        yield _answer(sample)


def problem_lines(group: Sequence[EvalSample]) -> Iterator[Text]:
    """Yield the lines of a problem of an evaluation and its completions."""
    first = group[0]
    yield Text()
    yield Text(f"problem {first.problem}", style="bold")
    yield Text("prompt     ").append(printable(first.prompt))
    yield Text("reference  ").append(printable(first.reference))
    for sample in group:
        facts = [VERDICTS[sample.correct], f"reward {sample.reward:g}", sample.finish_reason, f"{sample.tokens} tokens"]
        if sample.answer is not None:
            facts.append(f"answer {printable(sample.answer)}")
        facts += [f"{name} {value:g}" for name, value in sample.metrics.items()]
        versions = sorted({sample.version_min, sample.version_max})
        facts.append("v" + "-".join(map(str, versions)))
        yield Text(f"  {sample.sample:>4}  ").append(", ".join(facts), style=_COLOURS[sample.correct])
        yield Text(" " * 8).append(printable(sample.completion))


def dropped_lines(group: Sequence[SampleView]) -> Iterator[Text]:
    """Yield the lines of a group that was not trained, and its episodes."""
    first = group[0]
    yield Text()
    yield Text(f"ticket {first.row.group}: prompt {first.row.prompt_index}", style="bold")
    yield Text("prompt     ").append(printable(first.turns[0].text))
    yield Text("reference  ").append(printable(first.reference or "unknown"))
    for view in group:
        row = view.row
        reward = "no reward" if row.reward is None else f"reward {row.reward:g}"
        facts = [reward, VERDICTS[row.correct], row.finish_reason, f"{row.tokens} tokens", printable(row.outcome)]
        facts += [] if row.staleness is None else [f"{row.staleness} behind"]
        label = f"  {row.sample_id.rpartition('/')[2]:>4}  "
        yield Text(label).append(", ".join(facts), style=_COLOURS[row.correct])
        text = Text(" " * 8)
        for turn in view.turns[1:]:
            text.append(printable(turn.text), style="dim" if turn.kind == "context" else "")
        yield text


def printable(text: str) -> str:
    """Escape all characters but printable ones and line ends: a completion must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text).replace("\n", "\n" + " " * 8)


def _facts(sample: Sample) -> Text:
    parts = [f"reward {sample.reward:g}", VERDICTS[sample.correct], sample.finish_reason]
    parts += [f"{name} {value:g}" for name, value in sample.metrics.items()]
    parts += [f"reward {reward:g} at {position}" for position, reward in sample.rewards]
    if sample.score is not None:
        parts.append(f"score {sample.score:+.3f}")
    parts.append(f"staleness {sample.staleness}")
    parts.append(f"advantage {_signed(sample.advantage)}")
    if sample.logprob_difference is not None:
        parts.append(f"|prox - behav| {sample.logprob_difference:.2e}")
    parts.append(" -> ".join(f"{server} ({tokens})" for server, tokens in sample.route) or "no server known")
    label = f"  {sample.sample_id.rpartition('/')[2]:>4}  "
    return Text(label).append(", ".join(parts), style=_COLOURS[sample.correct])


def _answer(sample: Sample) -> Text:
    text = Text(" " * 8)
    for span in sample.spans:
        if span.version is None:
            text.append("[context]", style="dim").append(printable(span.text), style="dim")
            continue
        style = _STYLES[span.version % len(_STYLES)]
        text.append(f"[v{span.version}]", style=f"dim {style}").append(printable(span.text), style=style)
    return text


def _signed(value: Any) -> str:
    return "unknown" if value is None else f"{value:+.4f}"
