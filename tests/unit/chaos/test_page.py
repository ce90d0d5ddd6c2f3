"""The page of docs/chaos.md is made of the results, whatever they are."""

from tests.chaos import page
from tests.chaos.schedule.rows import PHASES, SUSPENDED
from tests.support.faults.points import POINTS


def row(fault, phase="push", outcome="survived", case="signals-0", recovery_s=1.25, **fields):
    return {
        "case": case,
        "fault": fault,
        "phase": phase,
        "outcome": outcome,
        "recovery_s": recovery_s,
        "reissued": 4,
        "lost": 0,
        "twice": 0,
        **fields,
    }


def outcome(*rows, problems=()):
    case = {"name": "x", "rows": list(rows), "seconds": 60.0, "rejudged": 1200, "problems": list(problems)}
    return {"seed": 7, "jobs": 2, "cores": 2, "seconds": 90.0, "cases": [case]}


def test_signals_make_a_matrix_other_faults_a_table():
    text = page.section(
        outcome(
            row("SIGKILL model_worker"),
            row(f"{SUSPENDED} rollout_worker", recovery_s=8.0),
            row("SIGKILL model_worker", case="between", phase="manifest"),
            row("SIGKILL model_worker", case="between", phase="checkpoint", recovery_s=2.0),
            row("disk full", "weight write", "ended: model_worker/0: no | space", "enospc", recovery_s=None),
        )
    )
    lines = text.splitlines()
    assert lines[0] == "## As measured"
    assert "| push | - | - | - | 1.2 (4) | - |" in lines
    assert "| push | 8.0 (4) | - | - | - | - |" in lines
    assert sum(line.startswith("| load |") for line in lines) == 2 and len(PHASES) == 10
    assert "| SIGKILL model_worker | manifest: 1.2 (4); checkpoint: 2.0 (4) |" in lines
    assert "| disk full | weight write: ended: model_worker/0: no \\| space |" in lines


def test_summary_counts_and_hides_nothing():
    found = page.summary(
        outcome(
            row("a"),
            row("b", outcome="ended: x"),
            row("c", outcome="did not recover", lost=2, twice=1),
            row("d", outcome="skipped: needs etcd", lost=None, twice=None),
            problems=["step 3: sample s has reward 1, judged 0"],
        )
    )
    assert found == (
        "Seed 7, 2 runs at a time on 2 cores, 1.5 minutes: 4 faults in 1 runs, 1 survived, 1 ended with the error that "
        "they should, 1 neither, 1 skipped (needs etcd), 2 lost, 1 twice; 1,200 trained completions judged again, 1 of "
        "them otherwise."
    )


def test_the_page_lists_every_point():
    text = page.PAGE.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        f"| `{name}` | {when} |" for name, when in POINTS.items()
    ]
