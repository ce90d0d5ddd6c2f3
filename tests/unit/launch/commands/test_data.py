"""`realsys data check`: its report, its bad rows and its exit code."""

import json
import os

import pytest

from realsys.data.arith import write_char_tokenizer
from realsys.launch.cli import main
from tests.support.data.data_rows import DAPO, GSM8K, HUMANEVAL, ROWS, TEMPLATE, char_tokenizer, jsonl

pytestmark = pytest.mark.processes

LONG = (
    "Tom has 12 apples and buys 3 more apples at the market on Sunday with his {} friend. Then he gives half of all "
    "his apples to his sister. How many apples has he left?"
)


def run(capsys, *argv):
    code = main(["data", "check", *map(str, argv)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"messages"}))
def test_good_file_is_reported(tmp_path, capsys, name):
    path = jsonl(tmp_path / "rows.jsonl", [ROWS[name]])
    code, out, err = run(capsys, path, "data.eval_fraction=0", "data.verifier=exact")
    assert (code, err) == (0, "")
    assert f"{path}: layout " in out and "1 train, 0 held out" in out and "first prompt:" in out


def test_bad_rows_are_named_by_line_and_field(tmp_path, capsys):
    rows = [GSM8K, {"question": "a", "answer": "18"}, {"answer": "#### 1", "question": ""}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    path.write_text(path.read_text() + "\nnot json\n")
    code, out, err = run(capsys, path)
    assert code == 2 and "3 bad" in out
    assert err.splitlines() == [
        f"realsys: {path}:2: field 'answer': must end with a line #### and the final answer",
        f"realsys: {path}:3: field 'question': is empty",
        f"realsys: {path}:5: JSON is malformed: invalid character (byte 4)",
    ]


def test_rows_that_a_model_would_see_otherwise_are_named(tmp_path, capsys):
    rows = [
        {"prompt": "<image>a", "answer": "1", "images": [{"path": "a.png"}]},
        {"prompt": "b", "answer": "1", "images": []},
    ]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    code, _, err = run(capsys, path, "data.eval_fraction=0", "data.verifier=exact")
    assert code == 2 and err == (
        f"realsys: {path}:1: field 'images': models get text only: remove the row, or the field if the text is enough\n"
    )
    path.write_text("")
    assert run(capsys, path) == (2, "", f"realsys: {path}: no prompts found: add rows\n")


def test_marks_of_the_chat_template_are_reported(tmp_path, capsys):
    write_char_tokenizer(tmp_path / "model", chat=True)
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "<|im_start|>user\na<|im_end|>", "answer": "1"}])
    argv = (path, f"model.path={tmp_path / 'model'}", "data.verifier=exact", "data.eval_fraction=0")
    code, out, _ = run(capsys, *argv)
    assert code == 0 and "formatted   1 prompts have a mark, and the chat template writes it again" in out


def test_tools_that_the_template_leaves_out_are_reported(tmp_path, capsys):
    write_char_tokenizer(tmp_path / "model", chat=True)
    file = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    file.write_text(json.dumps(config | {"chat_template": template}))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    told = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}]
    for key, row, part in (
        (0, {"prompt": "a", "answer": "1", "tools": [tool]}, "tools"),
        (1, {"prompt": told, "answer": "1"}, "system message"),
    ):
        path = jsonl(tmp_path / f"{key}.jsonl", [{"prompt": "b", "answer": "1"}, row])
        argv = (path, f"model.path={tmp_path / 'model'}", "data.verifier=exact", "data.eval_fraction=0")
        code, out, _ = run(capsys, *argv)
        assert code == 0 and f"left out    {path}:2: {part}: the chat template does not print it" in out
    file.write_text(
        json.dumps(config | {"chat_template": "{{ tools }}" + template.replace(" if m.role != 'system'", "")})
    )
    assert "left out" not in run(capsys, *argv)[1]


def test_many_bad_rows_are_counted(tmp_path, capsys):
    path = jsonl(tmp_path / "rows.jsonl", [GSM8K, *[{"question": "a", "answer": "1"}] * 150])
    code, out, err = run(capsys, path)
    assert code == 2 and "150 bad" in out
    assert len(err.splitlines()) == 21 and "130 more rows are bad" in err


def test_model_gives_tokens_and_the_rendered_prompt(tmp_path, capsys):
    tokenizer = char_tokenizer(tmp_path / "model", TEMPLATE)
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a1", "answer": "1"}, {"prompt": "a" * 50, "answer": "1"}])
    argv = (path, f"model.path={tokenizer.path}", "data.max_prompt_tokens=40", "data.verifier=exact")
    code, out, err = run(capsys, *argv)
    assert code == 2 and "<bos>user a1<eos>assistant" in out and "tokens      min 1" in out
    assert "rows.jsonl:2: the prompt has 67 tokens, but data.max_prompt_tokens is 40" in err
    code, out, err = run(capsys, *argv, "data.long_prompts=drop")
    assert (code, err) == (0, "") and "1 rows have more than 40 tokens and are left out" in out


def test_prompt_refused_by_the_template_is_bad(tmp_path, capsys):
    tokenizer = char_tokenizer(tmp_path / "model", TEMPLATE)
    system = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": system, "answer": "1"}])
    code, _, err = run(capsys, path, f"model.path={tokenizer.path}")
    assert code == 2 and f"{path}:2: field 'prompt': chat template" in err and "no system" in err


def test_duplicates_leaks_and_near_duplicates_are_reported(tmp_path, capsys):
    texts = ["A one", "b two", "a  ONE", LONG.format("old"), "c three"]
    train = jsonl(tmp_path / "t.jsonl", [{"prompt": text, "answer": "1"} for text in texts])
    held = jsonl(tmp_path / "e.jsonl", [{"prompt": text, "answer": "1"} for text in (LONG.format("new"), "B two")])
    code, out, _ = run(capsys, train, f"data.eval={held}")
    assert code == 0 and "4 train, 2 held out (data.eval)" in out
    assert f"1 rows repeat the prompt of an earlier row: {train}:3" in out
    assert f"1 train rows have a held-out prompt and are left out of training: {train}:2" in out
    assert f"1 train rows are similar to one of 2 held-out prompts: {train}:4 and {held}:1 (0." in out


def test_held_out_part_is_compared_with_the_rest(tmp_path, capsys):
    rows = [{"prompt": LONG.format(f"old{i % 3}"), "answer": "1"} for i in range(3)]
    path = jsonl(tmp_path / "t.jsonl", rows)
    _, out, _ = run(capsys, path, "data.eval_fraction=0.5")
    assert "similar to one of" in out and " held out (data.eval_fraction=0.5)" in out


def test_code_tasks_are_counted(tmp_path, capsys):
    code, out, _ = run(capsys, jsonl(tmp_path / "t.jsonl", [HUMANEVAL]), "data.verifier=exact")
    assert code == 0 and "code tests  1 rows" in out


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["/no/such.jsonl"], "data.train='/no/such.jsonl': is not a readable file or folder"),
        (["DIR/path", "data.layout=nope"], "unknown layout"),
        (["DIR/path", "data.layout=gsm8k", "data.layout_args={a: 1}"], "do not fit gsm8k"),
        (["DIR/path", "data.eval=/no/such"], "data.eval"),
        (["DIR/path", "model.path=/no/such"], "tokenizer.json"),
        (["DIR/path", "data.verifier=nope"], "unknown verifier"),
        (["DIR/path", "data.verifier_args={nope: 1}"], "do not fit math"),
        (["DIR/odd"], "no known layout has the keys a"),
        (["reasoning_gym:no_such_set"], "reasoning"),
    ],
)
def test_wrong_call_is_one_line(tmp_path, capsys, argv, problem):
    jsonl(tmp_path / "path", [DAPO])
    jsonl(tmp_path / "odd", [{"a": 1}])
    code, out, err = run(capsys, *(text.replace("DIR", str(tmp_path)) for text in argv))
    assert (code, out) == (2, "") and problem in err and err.count("\n") == 1


def test_verifier_checks_references(tmp_path, capsys, monkeypatch):
    """A verifier with ``check_answer`` sees each row in its process; its reason is that of a bad row."""
    (tmp_path / "own_judge.py").write_text(
        "from realsys.reward.verifiers.contract import declare\n\n\n"
        "def problem(item):\n"
        "    return None if item.extra['data_source'] and item.answer == '18' else f'{item.answer} is not 18'\n\n\n"
        "@declare(check_answer=problem)\n"
        "def judge(item, *, strict=False):\n    return True\n\n\n"
        "@declare(check_answer=lambda item: item.extra['none'])\n"
        "def broken(item):\n    return True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    path = jsonl(tmp_path / "t.jsonl", [DAPO, {**DAPO, "reward_model": {"ground_truth": 19}}])
    code, _, err = run(capsys, path, "data.verifier=own_judge:judge", "data.verifier_args={strict: true}")
    reason = "field 'answer': cannot be verified by own_judge:judge: 19 is not 18"
    assert code == 2 and err == f"realsys: {path}:2: {reason}\n"
    code, _, err = run(capsys, path, "data.verifier=own_judge:broken")
    assert code == 2 and len(err.splitlines()) == 2 and "KeyError: 'none'" in err.splitlines()[0]


@pytest.mark.parametrize(("words", "hints"), [([], 1), (["data.verifier=math"], 0)])
def test_text_answers_lead_to_the_verifier(tmp_path, capsys, words, hints):
    path = jsonl(tmp_path / "t.jsonl", [{"prompt": "a", "answer": "forty two"}])
    code, _, err = run(capsys, path, *words)
    assert code == 2 and err.count("realsys: name the verifier of your task: data.verifier=\n") == hints


def test_row_that_json_cannot_hold_is_bad(tmp_path, capsys, monkeypatch):
    (tmp_path / "own_rows.py").write_text(
        "from realsys.data.layouts import ProblemRow\n\n\n"
        "def read(row):\n    return ProblemRow('a', '1', {'key': object()})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, err = run(capsys, jsonl(tmp_path / "t.jsonl", [{"a": 1}]), "data.layout=own_rows:read")
    assert code == 2 and "t.jsonl:1: cannot be written as JSON" in err and err.count("\n") == 1


@pytest.mark.needs(package="reasoning_gym")
def test_generated_tasks_are_checked(capsys):
    code, out, err = run(
        capsys, "reasoning_gym:chain_sum", "data.verifier=reasoning_gym", "data.source_args={size: 30}"
    )
    assert (code, err) == (0, "") and "layout realsys" in out and "30" not in json.dumps(err)


def test_rows_to_learn_from_are_shown_with_their_loss(tmp_path, capsys):
    write_char_tokenizer(tmp_path / "model", chat=True)
    rows = [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}, {"prompt": "1+1?", "chosen": "2", "rejected": ""}]
    good, bad = jsonl(tmp_path / "good.jsonl", rows[:1]), jsonl(tmp_path / "bad.jsonl", rows)
    algorithm = ("train.ppo.algorithm=dpo", "train.ppo.kl.coef=0", "data.eval_fraction=0")
    code, out, _ = run(capsys, good, *algorithm, f"model.path={tmp_path / 'model'}")
    assert code == 0 and "rows        1 train, 0 held out (data.eval_fraction=0)" in out
    assert ">>>2<|im_end|><<<\n" in out and ">>>3<|im_end|><<<\n" in out
    code, out, err = run(capsys, bad, *algorithm, f"model.path={tmp_path / 'model'}")
    assert (code, out) == (2, "") and err.startswith(f"realsys: {bad}:2: rejected is empty; a line must be")
    assert run(capsys, good, *algorithm)[0] == 2  # without a model there are no tokens
