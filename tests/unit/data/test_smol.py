"""The sums of experiment=smol; `make smol` itself converts and trains the model."""

import pytest

from realsys.data import smol


def test_no_held_out_sum_is_trained():
    train, held_out = smol.sums()
    prompts = [row["prompt"][-1]["content"] for row in train + held_out]
    assert len(set(prompts)) == len(prompts) == (smol.LARGEST - 1) ** 2 - 1  # 3 + 4 is the example
    assert len(held_out) == smol.HELD_OUT


def test_answers_are_right():
    for row in [row for rows in smol.sums() for row in rows]:
        a, b = row["prompt"][-1]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
        assert row["answer"] == str(int(a) + int(b))


def test_missing_package_names_its_command(monkeypatch):
    monkeypatch.setattr(smol, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="make smol"):
        smol.package_folder()
