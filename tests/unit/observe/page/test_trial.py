"""What the page says about a run, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from realsys.manager.ledger import events as e
from realsys.manager.ledger.journal import Journal
from realsys.observe.page.trial_reader import MOST_NOTES, TrialReader, ledger_counts
from realsys.observe.step_log import EventLog
from tests.support.view.shown_trial import STEPS, sample_trial


def test_ended_run_is_told_from_its_folder(tmp_path: Path) -> None:
    paths = sample_trial(tmp_path)
    run = TrialReader(paths, lambda: False).run()
    assert (run["experiment"], run["trial"], run["state"]) == ("demo", "shown", "done")
    assert run["progress"] == {"kind": "step", "done": STEPS, "total": STEPS}
    assert run["bottleneck"].startswith("generation-bound: the trainer waits 45 %")
    assert run["split"]["parts"]["wait"][1] == 45
    assert dict(run["identity"])["allocation"] == "serve.d1p1m1+d2p1m1"
    assert [made["accuracy"] for made in run["evaluations"]] == [None, 0.74, 0.58, 0.41]
    assert run["restarts"] == 1 and run["notes"][0]["kind"] == "stop"


def test_trial_without_summary_was_killed(tmp_path: Path) -> None:
    paths = sample_trial(tmp_path)
    paths.summary.unlink()
    assert TrialReader(paths, lambda: False).run()["state"] == "killed"
    assert TrialReader(paths, lambda: True).run()["state"] == "running"


def test_curves_are_sent_when_they_changed(tmp_path: Path) -> None:
    paths = sample_trial(tmp_path)
    reader = TrialReader(paths, lambda: True)
    first = reader.curve_document(-1)
    assert reader.curve_document(first["seen"]) == {"seen": first["seen"]}
    with paths.steps.open("a") as file:
        file.write('{"kind": "train", "step": 41, "time": 1}\n')
    assert reader.curve_document(first["seen"])["columns"]["step"][-1] == STEPS + 1


def test_many_notes_remove_no_mark(tmp_path: Path) -> None:
    paths = sample_trial(tmp_path)
    log = EventLog(paths.events)
    for number in range(MOST_NOTES + 5):
        log.add("note", f"note {number}")
    reader = TrialReader(paths, lambda: True)
    assert [mark["kind"] for mark in reader.curve_document(-1)["marks"]] == ["rolled_back", "restart"]
    assert len(reader.run()["notes"]) == MOST_NOTES


def test_resumed_start_is_sent_at_once(tmp_path: Path) -> None:
    paths = sample_trial(tmp_path)
    reader = TrialReader(paths, lambda: True)
    seen = reader.curve_document(-1)["seen"]
    EventLog(paths.events).add("start", "continues after step 40")
    marks = reader.curve_document(seen)["marks"]
    assert (marks[-1]["kind"], marks[-1]["step"]) == ("start", STEPS + 0.5)


def test_ledger_is_counted_from_the_journal(tmp_path: Path) -> None:
    paths = sample_trial(tmp_path)
    with Journal(paths.ledger) as journal:
        granted = [e.Granted(f"{n:010d}", 0, n, n, "rollout_worker/0", "i", 0, 1.0) for n in range(3)]
        journal.append([*granted, e.Finished("0000000001", 0, "accepted", "", False, 2.0)])
    counts = ledger_counts(paths)
    assert (counts["granted"], counts["running"], counts["finished"]) == (3, 2, 1)
    paths.ledger.write_bytes(b"no ledger\n" + paths.ledger.read_bytes())
    assert TrialReader(paths, lambda: False).run()["ledger"] is None
