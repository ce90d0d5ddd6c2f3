"""The generated task: hold-out, lengths, determinism, noise."""

import itertools
import json
import random
import re
import zlib

import pytest

from realsys.config.schema import ArithConfig
from realsys.data import arith
from realsys.errors import ConfigError
from realsys.reward.verifiers.contract import Item
from realsys.reward.verifiers.exact import exact

SMALL = ArithConfig(train_size=1500, eval_size=300, demo_size=1500)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_held_out_prompt_is_never_trained_on(tmp_path):
    arith.write_dataset(SMALL, tmp_path, seed=3)
    train, held, demos = (read(tmp_path / f"{name}.jsonl") for name in ("train", "eval", "demos"))
    assert (len(train), len(held), len(demos)) == (1500, 300, 1500)
    evaluated = {record["prompt"] for record in held}
    assert all(zlib.crc32(prompt.encode()) % 8 == 0 for prompt in evaluated)
    assert not evaluated & {record["prompt"] for record in train + demos}


def test_seed_alone_decides_the_files(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arith.write_dataset(SMALL, tmp_path / name, seed=seed)
    for file in ("train.jsonl", "eval.jsonl", "demos.jsonl"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def test_completion_lengths_span_order_of_magnitude(tmp_path):
    arith.write_dataset(SMALL, tmp_path, seed=1)
    lengths = sorted(len(record["response"]) + 1 for record in read(tmp_path / "demos.jsonl"))
    assert lengths[-1] >= 10 * lengths[len(lengths) // 20]
    assert lengths[-1] <= 200 and lengths[len(lengths) // 2] < lengths[-1] / 4


def test_noisy_demonstration_carries_its_error_on():
    """A clean demonstration is right."""
    record = arith.demonstration([3, 5, 7], 0.0, random.Random(1))
    assert (record.prompt, record.response) == ("a3b5c7=", "a0+3=3;b3+5=8;c8+7=15;#15")
    noisy = arith.demonstration([3, 5, 7], 1.0, random.Random(1))
    steps = noisy.response.partition("#")[0].rstrip(";").split(";")
    for step, following in itertools.pairwise(steps):
        assert following[1:].partition("+")[0] == step.partition("=")[2]


def test_noise_sets_share_of_wrong_demonstrations(tmp_path):
    fixed = ArithConfig(min_operands=4, max_operands=4, train_size=1, eval_size=1, demo_size=2000, demo_noise=0.15)
    arith.write_dataset(fixed, tmp_path, seed=1)
    wrong = 0
    for record in read(tmp_path / "demos.jsonl"):
        total = sum(int(character) for character in record["prompt"] if character.isdigit())
        wrong += not exact(Item(record["prompt"], record["response"], str(total))).correct
    assert wrong / 2000 == pytest.approx(1 - 0.85**4, abs=0.05)  # 0.478, less errors that cancel


def test_task_without_held_out_prompt_is_error(tmp_path, monkeypatch):
    monkeypatch.setattr(arith, "MAX_DRAWS", 500)
    monkeypatch.setattr(arith, "is_held_out", lambda prompt: False)
    with pytest.raises(ConfigError, match="none to hold out"):
        arith.write_dataset(SMALL, tmp_path, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]  # and no half-written eval.jsonl


def test_second_try_shows_wrong_first_and_feedback(tmp_path):
    """Only the second try is imitated; without the setting the files are as they were."""
    plain, tries = ArithConfig(demo_size=400), ArithConfig(demo_size=400, second_tries=0.5, feedback=" no; {prompt}")
    for name, config in (("plain", plain), ("tries", tries)):
        arith.write_dataset(config, tmp_path / name, seed=3)
    for file in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "tries" / file).read_bytes()
    records = read(tmp_path / "tries" / "demos.jsonl")
    second = [record for record in records if " no; " in record["prompt"]]
    assert 150 < len(second) < 250
    for record in second:
        first, _, problem = record["prompt"].partition("<eos> no; ")
        operands = [int(digit) for digit in re.findall(r"[a-z](\d)", problem)]
        assert problem == arith.prompt_text(operands) and first.startswith(problem)
        assert int(first.rpartition("#")[2]) != sum(operands), "a right answer gets no feedback"
        assert record["response"].startswith("a0+")


CALL = '<tool_call>{"name": "add", "arguments": {"of": "{expression}"}}</tool_call>'


def test_forms_show_problems_as_chats(tmp_path):
    """The values of one demonstration belong to one problem; the first try that is shown is wrong."""
    retry = {
        "prompt": [
            {"role": "user", "content": "{prompt}"},
            {"role": "assistant", "content": "{wrong}"},
            {"role": "user", "content": "wrong"},
        ],
        "response": "{steps}#{sum}",
    }
    call = {"prompt": [{"role": "user", "content": "{prompt}"}], "tools": ["add"], "response": CALL, "weight": 3}
    arith.write_dataset(ArithConfig(demo_size=400, demo_noise=0.0, forms=[retry, call]), tmp_path, seed=3)
    records = read(tmp_path / "demos.jsonl")
    calls = [record for record in records if "tools" in record]
    assert 260 < len(calls) < 340
    for record in records:
        operands = [int(digit) for digit in re.findall(r"[a-z](\d)", record["prompt"][0]["content"])]
        if record in calls:
            assert record["response"] == CALL.replace("{expression}", "+".join(map(str, operands)))
            assert record["tools"] == [{"type": "function", "function": {"name": "add"}}]
        else:
            assert record["response"] == arith.demonstration(operands, 0.0, random.Random(1)).response
            assert int(record["prompt"][1]["content"].rpartition("#")[2]) != sum(operands)


def test_malformed_form_is_refused(tmp_path):
    form = {"prompt": [{"role": "nobody", "content": "{prompt}"}], "response": "{sum}"}
    with pytest.raises(ConfigError, match=r"data\.arith\.forms.*role"):
        arith.write_dataset(ArithConfig(forms=[form]), tmp_path, seed=1)


def test_rejected_response_has_one_wrong_step(tmp_path):
    config = ArithConfig(train_size=1, eval_size=1, demo_size=300)
    arith.write_dataset(config, tmp_path, seed=3, preferences=True)
    pairs = read(tmp_path / "demos.jsonl")
    assert len(pairs) == 300 and not any(zlib.crc32(pair["prompt"].encode()) % 8 == 0 for pair in pairs)
    for pair in pairs:
        operands = [int(digit) for digit in re.findall(r"[a-z](\d)", pair["prompt"])]
        assert pair["chosen"] == arith.demonstration(operands, 0.0, random.Random(1)).response
        total, errors = 0, []
        for before, operand, after in re.findall(r"[a-z](\d+)\+(\d)=(\d+);", pair["rejected"]):
            assert int(before) == total
            errors.append(int(after) - total - int(operand))
            total = int(after)
        (error,) = [each for each in errors if each]
        assert len(errors) == len(operands) and error in arith.ERRORS
        assert int(pair["rejected"].rpartition("#")[2]) == total == sum(operands) + error


def test_pairs_of_forms_have_one_prompt(tmp_path):
    prompt = [{"role": "user", "content": "{prompt}"}]
    forms = [
        {"prompt": prompt, "tools": ["add"], "response": CALL},
        {"prompt": [*prompt, {"role": "assistant", "content": "{wrong}"}, *prompt], "response": "{steps}#{sum}"},
    ]
    arith.write_dataset(ArithConfig(demo_size=100, forms=forms), tmp_path, seed=3, preferences=True)
    for pair in read(tmp_path / "demos.jsonl"):
        operands = [int(digit) for digit in re.findall(r"[a-z](\d)", pair["prompt"][0]["content"])]
        right = arith.demonstration(operands, 0.0, random.Random(1)).response
        expected = CALL.replace("{expression}", "+".join(map(str, operands))) if "tools" in pair else right
        assert pair["chosen"] == expected != pair["rejected"]
    same = ArithConfig(forms=[{"prompt": prompt, "response": "done"}])
    with pytest.raises(ConfigError, match=r"data\.arith\.forms.*is the same for right and wrong steps"):
        arith.write_dataset(same, tmp_path, seed=1, preferences=True)
