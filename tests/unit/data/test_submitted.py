"""Rows that the training script submits: written by whole lines, read by number while the file grows."""

import asyncio
import json
import os

import pytest

from realsys.config.schema import Config, DataConfig, EvalConfig
from realsys.data import submitted
from realsys.data.prompts import PromptDataset
from realsys.data.submitted import SubmittedLines, SubmittedWriter
from realsys.errors import DataError
from tests.support.data.data_rows import GSM8K, char_tokenizer, jsonl, trial

SIZE = 4  # prompts of the train split
OWN = DataConfig()


def row(number, **more):
    return {"prompt": f"a{number}=", "answer": str(number), **more}


def opened(tmp_path, **data):
    """Return a trial's prompts, and the writer of the rows of its script."""
    paths = trial(tmp_path)
    paths.data.mkdir(parents=True, exist_ok=True)
    train = jsonl(tmp_path / "train.jsonl", [row(k) for k in range(SIZE)])
    settings = DataConfig(train=str(train), eval_fraction=0.0, order="script", **data)
    config = Config(data=settings, evaluation=EvalConfig(problems=0))
    prompts = PromptDataset(config, paths, char_tokenizer(tmp_path / "model"))
    return prompts, SubmittedWriter(paths.submitted, settings, SIZE)


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_rows_of_a_script_are_read_by_their_numbers(tmp_path):
    """Also what was written after the file was opened; a train prompt without an agent has no line."""
    prompts, writer = opened(tmp_path)
    assert writer.append([(2, ""), (row(7, agent="mine", note=[1]), "")]) == [2, SIZE]
    made = prompts.prompt("train", SIZE)
    assert (made.text, made.answer, made.agent, made.extra) == ("a7=", "7", "", {"agent": "mine", "note": [1]})
    assert writer.append([(row(8), "tool_use"), (3, "my.agents:Mine"), (1, "")]) == [SIZE + 1, SIZE + 2, 1]
    assert [prompts.prompt("train", SIZE + k).text for k in range(3)] == ["a7=", "a8=", "a3="]
    assert [prompts.prompt("train", k).agent for k in (3, SIZE + 1, SIZE + 2)] == ["", "tool_use", "my.agents:Mine"]
    assert prompts.size("train") == SIZE, "evaluations and epochs know the train split alone"


def test_row_may_have_the_layout_of_the_data(tmp_path):
    prompts, writer = opened(tmp_path, layout="gsm8k", max_prompt_tokens=64)
    assert writer.append([(GSM8K, "")]) == [SIZE]
    assert prompts.prompt("train", SIZE).answer == "18"


@pytest.mark.parametrize(
    ("bad", "agent", "problem"),
    [
        (SIZE, "", f"row 1: prompt {SIZE} not found: the train split has {SIZE}"),
        (-1, "", "row 1: prompt -1 not found"),
        (True, "", "row 1 is bool: it must be the number of a train prompt, or a dict"),
        ({"prompt": "a1="}, "", "row 1: no known layout has the keys prompt"),
        (row(1) | {"prompt": []}, "", "row 1: field 'prompt': must be a list of messages that is not empty"),
        (row(1, image="x.png"), "", "row 1: field 'image': models get text only"),
        (row(1, x={1, object()}), "", "row 1: cannot be written as JSON"),
        (row(1, x="x" * 2000), "", "row 1: has 2,045 bytes as JSON: 1,000 are the most"),
        (row(1), "no_agent", "row 1: agent 'no_agent' not found: use one of distill, multi_turn"),
        (0, "m:" + "x" * 300, "row 1: agent has 302 characters"),
    ],
)
def test_bad_row_is_named_and_nothing_is_written(tmp_path, monkeypatch, bad, agent, problem):
    monkeypatch.setattr(submitted, "MOST_LINE_BYTES", 1000)
    _, writer = opened(tmp_path)
    with pytest.raises(DataError) as caught:
        writer.append([(row(5), ""), (bad, agent)])
    assert str(caught.value).startswith(problem) and "\n" not in str(caught.value)
    assert writer.path.read_bytes() == b""


def test_limits_of_prompts_hold_for_submitted_rows(tmp_path):
    prompts, writer = opened(tmp_path, max_prompt_tokens=16)
    writer.append([({"prompt": "1" * 40, "answer": "1"}, "")])
    with pytest.raises(
        DataError, match=r"submitted.jsonl:1: the prompt has 41 tokens, but data.max_prompt_tokens is 16"
    ):
        prompts.prompt("train", SIZE)


def test_torn_last_line_is_cut_off_and_its_number_used_again(tmp_path):
    """A reader that looked in between has not seen it."""
    prompts, writer = opened(tmp_path)
    writer.append([(row(7), "")])
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b'{"row":{"prompt":"torn')
    with pytest.raises(DataError, match="line 2 not found; the file has 1 lines"):
        prompts.prompt("train", SIZE + 1)
    with SubmittedWriter(writer.path, OWN, SIZE) as again:
        assert again.append([(row(9), "")]) == [SIZE + 1]
    assert [prompts.prompt("train", SIZE + k).text for k in range(2)] == ["a7=", "a9="]


def test_full_disk_keeps_the_numbers_that_readers_may_have_seen(tmp_path, monkeypatch):
    """The first of two lines is whole when the disk is full: it stays, and the next row has another number."""
    prompts, writer = opened(tmp_path)
    write, calls = os.write, []

    def half(fd, data):
        calls.append(data)
        return write(fd, data[: data.index(b"\n") + 5] if len(calls) == 1 else data)

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(DataError, match="disk full"):
        writer.append([(row(5), ""), (row(6), "")])
    assert prompts.prompt("train", SIZE).text == "a5="
    assert writer.append([(row(7), "")]) == [SIZE + 1]
    assert [prompts.prompt("train", SIZE + k).text for k in range(2)] == ["a5=", "a7="]


def test_second_writer_of_the_file_is_noticed(tmp_path):
    _, writer = opened(tmp_path)
    with SubmittedWriter(writer.path, OWN, SIZE) as younger:
        younger.append([(row(1), "")])
    with pytest.raises(DataError, match="another process has written to it"):
        writer.append([(row(2), "")])
    assert len(lines(writer.path)) == 1


def test_reader_waits_for_a_line_of_another_machine(tmp_path):
    prompts, writer = opened(tmp_path)

    async def scenario():
        async with asyncio.timeout(60):
            waiting = asyncio.create_task(prompts.arrival("train", SIZE))
            await prompts.arrival("train", SIZE - 1)
            assert not waiting.done()
            writer.append([(row(7), "")])
            await waiting

    asyncio.run(scenario())
    assert prompts.prompt("train", SIZE).text == "a7="


def test_line_that_never_comes_is_named(tmp_path):
    missing = SubmittedLines(tmp_path / "submitted.jsonl", wait_s=0.0)
    with pytest.raises(DataError, match=r"submitted.jsonl: line 3 not found after a wait of 0 s: do all machines"):
        asyncio.run(missing.arrival(2))


def test_a_look_reads_only_what_is_new(tmp_path):
    """The part that was read before may even be damaged."""
    path = tmp_path / "submitted.jsonl"
    with SubmittedWriter(path, OWN, SIZE) as writer:
        writer.append([(row(k), "") for k in range(3)])
        reader = SubmittedLines(path)
        reader.read(2)
        first = path.read_bytes().index(b"\n")
        with path.open("r+b") as file:
            file.write(b"\n" * first)  # would be many lines
        writer.append([(row(3), "")])
    assert json.loads(bytes(reader.read(3).row))["answer"] == "3"
