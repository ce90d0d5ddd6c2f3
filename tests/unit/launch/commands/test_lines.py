"""Samples on a terminal: facts, versions, and text that cannot control it."""

from __future__ import annotations

from rich.console import Console

from realsys.launch.commands.samples import group_lines, printable
from realsys.observe.samples.step_samples import Sample, VersionSpan


def make_sample(**fields: object) -> Sample:
    values: dict[str, object] = {
        "step": 3, "sample_id": "0007/1", "ticket_id": "0007", "attempt": 1, "episode": 0, "row": 0,
        "prompt_index": 12, "seed": 99,
        "granted_version": 2, "worker": "rollout_worker/0", "seconds": 1.5, "prompt": "1+1=", "completion": "2.",
        "spans": [VersionSpan(2, 1, "2"), VersionSpan(3, 1, ".")],
        "route": [("generation_server/0", 1), ("generation_server/1", 1)], "finish_reason": "stop", "reward": 5.0,
        "rewards": [], "score": None, "correct": True, "metrics": {}, "truncated": False,
        "staleness": 1, "advantage": 0.5,
        "logprob_difference": None,
    }  # fmt: skip
    return Sample(**{**values, **fields})  # type: ignore[arg-type]


def shown(*group: Sample) -> str:
    console = Console(width=200, record=True, force_terminal=False, color_system=None)
    with console.capture() as capture:
        for line in group_lines(group):
            console.print(line, highlight=False, soft_wrap=True)
    return capture.get()


def test_versions_and_servers_can_be_read_without_colour() -> None:
    text = shown(make_sample())
    assert "ticket 0007 attempt 1: prompt 12, seed 99, granted at v2, rollout_worker/0, 1.50 s" in text
    assert "[v2]2[v3]." in text
    assert (
        "reward 5, correct, stop, staleness 1, advantage +0.5000, generation_server/0 (1) -> generation_server/1 (1)"
        in text
    )


def test_what_nobody_computed_is_said_to_be_unknown() -> None:
    text = shown(make_sample(advantage=None, route=[], spans=[], score=-0.25))
    assert "score -0.250" in text and "advantage unknown" in text and "no server known" in text
    assert "prox" not in text


def test_a_row_with_another_history_shows_it() -> None:
    text = shown(make_sample(), make_sample(row=1, prompt="a summary"))
    assert text.count("from") == 1 and "from  a summary" in text


def test_context_metrics_and_rewards_of_turns_are_shown() -> None:
    spans = [VersionSpan(2, 1, "2"), VersionSpan(None, 1, "?"), VersionSpan(3, 1, "3")]
    text = shown(make_sample(spans=spans, metrics={"turns": 2.0}, rewards=[(4, 0.5)], correct=None))
    assert "[v2]2[context]?[v3]3" in text
    assert "reward 5, not judged, stop, turns 2, reward 0.5 at 4, staleness 1" in text


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\n[bold]c") == "a\\x1b[2Jb\\r\\x07\n        [bold]c"
    text = shown(make_sample(spans=[VersionSpan(2, 1, "\x1b]0;title\x07[red]x[/red]")]))
    assert "\x1b" not in text and "[v2]\\x1b]0;title\\x07[red]x[/red]" in text


def test_reference_follows_the_prompt() -> None:
    text = shown(make_sample(reference="2\x1b"))
    assert "prompt     1+1=\nreference  2\\x1b\n" in text
    assert "reference" not in shown(make_sample())
