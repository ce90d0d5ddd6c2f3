"""A log that grows, is cut off, or does not exist yet."""

from __future__ import annotations

from pathlib import Path

from realsys.observe.screen.terminal import LogTail


def test_new_text_is_read_once(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    tail = LogTail(log)
    assert tail.read() == ""
    log.write_text("one\n")
    assert (tail.read(), tail.read()) == ("one\n", "")
    with log.open("a") as file:
        file.write("two\n")
    assert tail.read() == "two\n"


def test_log_that_was_cut_off_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("a long line\n")
    tail = LogTail(log)
    tail.read()
    log.write_text("new\n")
    assert tail.read() == "new\n"


def test_last_lines_are_the_last(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("1\n2\n3\n")
    tail = LogTail(log)
    tail.skip_to_last(2)
    assert tail.read() == "2\n3\n"


def test_letter_in_two_parts_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    tail = LogTail(log)
    with log.open("ab", buffering=0) as file:
        file.write("ä".encode()[:1])
        first = tail.read()
        file.write("ä".encode()[1:])
    assert first + tail.read() == "ä"
