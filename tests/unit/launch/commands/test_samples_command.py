"""`realsys samples`: chosen samples of a step, of a stored evaluation, and of groups that were not trained."""

import asyncio
import json

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from realsys.config.paths import TrialPaths, write_config
from realsys.errors import RecordError
from realsys.generation.client import SamplingSpec
from realsys.generation.completion import Completion
from realsys.launch.cli import main
from realsys.launch.commands.play import Shown, episode_lines
from realsys.launch.commands.samples import group_lines, printable
from realsys.observe.dropped_groups import DroppedGroup, Room, write_group
from realsys.observe.evaluation_records import EvalSample, write_result
from realsys.observe.samples.catalogue import chosen_evaluation
from realsys.observe.samples.step_samples import Sample, VersionSpan
from realsys.rollout.resumable_engine import EngineCall
from realsys.types import Episode, Row, Ticket
from tests.support.processes.config_trees import changed
from tests.support.view.shown_trial import HOSTILE, sample_trial

RESULT = {"complete": True, "set": "eval", "problems": 2, "samples": 2, "accuracy": 0.75, "interval": [0.3, 0.95]}


def sample(problem, number, *, correct):
    answer = "7" if correct else "\x1b[2J8"
    return EvalSample(
        "after-4",
        "eval",
        problem,
        number,
        0,
        4,
        4,
        f"3+4={problem}",
        f"#{answer}",
        "7",
        5.0,
        correct,
        "stop",
        2,
        answer,
    )


SAMPLES = [
    sample(0, 0, correct=True),
    sample(0, 1, correct=False),
    sample(1, 0, correct=True),
    sample(1, 1, correct=True),
]


@pytest.fixture
def trial(tmp_path):
    paths = TrialPaths(tmp_path / "t")
    paths.root.mkdir()
    write_config(changed(), paths.config)
    for name, of_set in (("before-0", "eval"), ("before-0.sums", "sums"), ("after-4", "eval")):
        result = RESULT | {"set": of_set, "eval_id": name.replace("-0", "").replace("-4", ""), "version": 4}
        write_result(paths.evaluations / name, SAMPLES, result)
    return paths.root


def test_newest_evaluation_is_shown(trial, capsys):
    assert main(["samples", str(trial), "--eval"]) == 0
    shown = capsys.readouterr().out
    assert "after-4: version 4, accuracy 75.0% ± 32.5 (2 problems x 2)" in shown
    assert "reference  7" in shown and "\x1b[2J" not in shown and "wrong, reward 5, stop, 2 tokens" in shown


def test_filters_choose_completions(trial, capsys):
    assert main(["samples", str(trial), "--eval", "before", "--wrong", "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["completion"] == "#\x1b[2J8"
    assert main(["samples", str(trial), "--eval", "--problem", "1", "--correct", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(sample["problem"], sample.get("sample")) for sample in found] == [(1, 0), (1, 1)]


def test_evaluation_is_found_by_set_and_name(trial):
    root = TrialPaths(trial).evaluations
    assert chosen_evaluation(root, of_set="sums") == "before-0.sums"
    assert chosen_evaluation(root, "before.sums") == "before-0.sums"
    with pytest.raises(RecordError, match="use one of before-0"):
        chosen_evaluation(root, "step-9")
    with pytest.raises(RecordError, match="no evaluation of set 'other'"):
        chosen_evaluation(root, of_set="other")


def test_step_is_printed_with_its_references(tmp_path, capsys):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--ticket", "0000000001"]) == 0
    assert "reference  7" in capsys.readouterr().out
    assert main(["samples", str(paths.root), "--ticket", "nobody"]) == 2
    assert "step 40 has not trained ticket 'nobody': it has 0000000000" in capsys.readouterr().err


def test_dropped_groups_are_printed_with_reasons(tmp_path, capsys):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--dropped"]) == 0
    shown = capsys.readouterr().out
    assert "equal_rewards" in shown and "no reward, not judged" in shown and HOSTILE[:30] in shown


def test_too_old_group_is_printed_with_its_age(tmp_path, capsys):
    paths = sample_trial(tmp_path)
    assert main(["samples", str(paths.root), "--dropped", "--min-staleness", "1"]) == 0
    shown = capsys.readouterr().out
    assert "ticket 0000000079: prompt 0" in shown and "too old (masked), 6 behind" in shown and "reference  3" in shown
    assert "0000000080" not in shown


def test_reason_in_the_title_cannot_steer_the_terminal(tmp_path, capsys):
    """An error may quote a completion."""
    paths = sample_trial(tmp_path)
    reason = "RewardError: \x1b[2J"
    group = DroppedGroup(
        1.0, Ticket("7", 0, 0), "rollout_worker/0", reason, "1+2=", "3", [Room().episode(0, [], None, None)]
    )
    write_group(paths.dropped / "rollout_worker-0", group, 64)
    assert main(["samples", str(paths.root), "--dropped", "--limit", "0"]) == 0
    shown = capsys.readouterr().out
    assert "1 RewardError: \\x1b[2J" in shown and "\x1b" not in shown


# ---- Lines of `realsys play`, and its refusals


class _Letters:
    """Tokenizer whose tokens are letters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


class _Answers:
    """Engine with completions that are given."""

    def __init__(self, *texts):
        self._texts = iter(texts)

    async def generate(self, call, deliver=lambda number, completion: None):
        tokens = np.array([ord(letter) for letter in next(self._texts)], np.int32)
        return [Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")]

    def discard(self, ticket): ...


def _shown(*calls):
    """Return the lines of calls of one episode: (history, completion)."""
    lines: list[Text | str] = []
    engine = Shown(_Answers(*(made for _, made in calls)), _Letters(), lines.append)  # type: ignore[arg-type]
    for number, (history, _) in enumerate(calls):
        call = EngineCall(Ticket("0", 0, 0), f"0.{number}", [ord(c) for c in history], SamplingSpec(), seed=0)
        asyncio.run(engine.generate(call))
    return [str(line) for line in lines]


def test_conversation_shows_only_what_a_call_adds():
    assert _shown(("ask", "yes"), ("askyesmore", "no")) == [
        "  prompt     ask",
        "  sampled    yes",
        "  context    more",
        "  sampled    no",
    ]


def test_rewritten_history_is_a_branch():
    assert _shown(("ask", "yes"), ("other", "no"))[2] == "  branch     other"


def test_completion_cannot_control_the_terminal():
    assert _shown(("ask", "\x1b[2J"))[1] == "  sampled    \\x1b[2J"


def test_episode_tells_trained_tokens_and_parts_of_the_reward():
    mask = np.array([0, 0, 1, 1, 0, 1], np.bool_)
    behaviour = np.zeros(3, np.float32), np.zeros(3, np.int32)
    row = Row(np.arange(6, dtype=np.int32), mask, *behaviour, "length", rewards=((5, 0.25),))
    assert list(episode_lines(Episode([row], -1.0, False, {"format": 0.5, "gateway/retries": 0.0}, "7"))) == [
        "  row 0      6 tokens, 3 trained: prompt 0-1, trained 2-3, context 4, trained 5; length",
        "  reward     -1, wrong, answer 7, format 0.5, 0.25 at token 5",
    ]


@pytest.mark.parametrize(
    ("words", "field"), [(["experiment=arith"], "model.path"), (["missing", "--tasks", "0"], "--tasks")]
)
def test_bad_input_is_refused(words, field, capsys):
    assert main(["play", *words]) == 2
    assert field in capsys.readouterr().err


# ---- Samples on a terminal: facts, versions, and text that cannot control it


def make_sample(**fields):
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


def shown(*group):
    console = Console(width=200, record=True, force_terminal=False, color_system=None)
    with console.capture() as capture:
        for line in group_lines(group):
            console.print(line, highlight=False, soft_wrap=True)
    return capture.get()


def test_versions_and_servers_can_be_read_without_colour():
    text = shown(make_sample())
    assert "ticket 0007 attempt 1: prompt 12, seed 99, granted at v2, rollout_worker/0, 1.50 s" in text
    assert "[v2]2[v3]." in text
    assert (
        "reward 5, correct, stop, staleness 1, advantage +0.5000, generation_server/0 (1) -> generation_server/1 (1)"
        in text
    )


def test_what_nobody_computed_is_said_to_be_unknown():
    text = shown(make_sample(advantage=None, route=[], spans=[], score=-0.25))
    assert "score -0.250" in text and "advantage unknown" in text and "no server known" in text
    assert "prox" not in text


def test_a_row_with_another_history_shows_it():
    text = shown(make_sample(), make_sample(row=1, prompt="a summary"))
    assert text.count("from") == 1 and "from  a summary" in text


def test_context_metrics_and_rewards_of_turns_are_shown():
    spans = [VersionSpan(2, 1, "2"), VersionSpan(None, 1, "?"), VersionSpan(3, 1, "3")]
    text = shown(
        make_sample(spans=spans, metrics={"turns": 2.0, "gateway/retries": 0.0}, rewards=[(4, 0.5)], correct=None)
    )
    assert "[v2]2[context]?[v3]3" in text
    assert "reward 5, not judged, stop, turns 2, reward 0.5 at 4, staleness 1" in text


def test_an_answer_cannot_steer_the_terminal():
    assert printable("a\x1b[2Jb\r\x07\n[bold]c") == "a\\x1b[2Jb\\r\\x07\n        [bold]c"
    text = shown(make_sample(spans=[VersionSpan(2, 1, "\x1b]0;title\x07[red]x[/red]")]))
    assert "\x1b" not in text and "[v2]\\x1b]0;title\\x07[red]x[/red]" in text


def test_reference_follows_the_prompt():
    text = shown(make_sample(reference="2\x1b"))
    assert "prompt     1+1=\nreference  2\\x1b\n" in text
    assert "reference" not in shown(make_sample())
