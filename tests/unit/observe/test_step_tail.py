"""Reader of the step log while it is written."""

from __future__ import annotations

from pathlib import Path

from realsys.observe.step_log import StepTail, read_steps


def test_tail_returns_each_whole_record_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepTail(path)
    assert tail.read() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"kind":"phase"}\n{"kind":"tr')
        assert tail.read() == [{"kind": "phase"}]
        file.write(b'ain"}\n')
        assert tail.read() == [{"kind": "train"}]
        file.write(b'{"torn\n[]\n{"no":"kind"}\n{"kind":"eval"}\n')
        assert tail.read() == [{"kind": "eval"}]
    assert tail.skipped == 3 and tail.read() == []
    assert len(read_steps(path)) == 3
