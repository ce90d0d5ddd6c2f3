"""Live display at 80x24 and other sizes, from one to 64 servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from realsys.observe.screen.display import Frame, lines
from realsys.observe.screen.progress import TrialProgress

FRAME = Frame("arith/t", "/shared/runs/arith/t", 4, ["gserver_manager/0", "model_worker/0", "model_worker/1"])
ADDRESS = "http://127.0.0.1:4321"
CAUSE = "model_worker/1 exited with code 1: OSError: [Errno 28] No space left on device: '/shared/runs/x'"
NOTE = f"05:02:38 {CAUSE}; restart 1/5 of the trainer in 0.5 s, from step 8 (logs/model_worker-1.log)"


def train(step: int, **changes: Any) -> dict[str, Any]:
    record = {"kind": "train", "step": step, "total": 40, "version": step, "reward_mean": 0.7, "accuracy": 0.8}
    seconds = {"wait": 1.0, "inf": 2.0, "train": 3.0, "save": 0.5, "publish": 0.25, "total": 7.0}
    staleness = {"mean": 0.5, "max": 2}
    return {**record, "seconds": seconds, "staleness": staleness, "consumed_tokens_per_s": 4000.0, **changes}


def status(servers: int) -> dict[str, Any]:
    rows = [
        {"name": f"generation_server/{index}", "state": "ready", "version": 4, "running": 12, "tokens_per_s": 100.0}
        for index in range(servers)
    ]
    return {
        "version": 4,
        "servers": rows,
        "ledger": {"running": 12, "finished": 3, "trained": 256, "dropped": 4},
        "throughput": {"generated_tokens_per_s": 7900.0},
        "admission": {"headroom": 0, "admits": False, "reason": "staleness"},
    }


def shown(progress: TrialProgress, frame: Frame = FRAME, width: int = 80, height: int = 24) -> list[str]:
    text = [line.plain for line in lines(progress, frame, width, height)]
    assert len(text) <= height and max(map(len, text)) <= width
    return text


def running(servers: int = 1, records: Sequence[dict[str, Any]] = ()) -> TrialProgress:
    progress = TrialProgress()
    progress.add([{"kind": "phase", "phase": "train", "time": 1.0}, *(records or map(train, range(1, 5)))])
    progress.status, progress.address = status(servers), ADDRESS
    return progress


@pytest.mark.parametrize("servers", [1, 8, 64])
@pytest.mark.parametrize("size", [(80, 24), (80, 12), (120, 40), (40, 24)])
def test_notes_and_address_are_never_hidden(servers: int, size: tuple[int, int]) -> None:
    frame = Frame(FRAME.name, FRAME.folder, 4, notes=["05:02:37 earlier"] * 7 + [NOTE])
    text = " ".join(line.strip() for line in shown(running(servers), frame, *size))
    assert f"{ADDRESS}/" in text
    assert CAUSE.split()[0] in text and "No space left on device" in text
    if size[0] >= 80:
        assert f"{servers}: {servers} ready; {servers} at version 4" in text


@pytest.mark.parametrize("height", [1, 3, 5, 8])
def test_low_terminal_gets_the_first_lines(height: int) -> None:
    frame = Frame(FRAME.name, FRAME.folder, 4, notes=[NOTE])
    text = shown(running(8), frame, 80, height)
    assert len(text) == height and text[0].startswith("realsys  arith/t")


def test_server_in_trouble_is_first() -> None:
    progress = running(64)
    progress.status["servers"][38] |= {"state": "quarantined", "error": "its probe timed out"}
    progress.status["servers"][50] |= {"version": 3, "state": "updating", "updating_s": 7.4}
    text = shown(progress)
    [place] = [index for index, line in enumerate(text) if line.startswith("servers")]
    assert "64: 62 ready, 1 quarantined, 1 updating; 63 at version 4; 6,400" in text[place]
    assert text[place + 1].split()[:2] == ["server/38", "quarantined"] and "its probe timed out" in text[place + 1]
    assert text[place + 2].split()[:2] == ["server/50", "updating"] and "updating 7 s" in text[place + 2]
    assert text[-1].strip().startswith("and ")
    servers = [line for line in text if line.strip().startswith("server/")]
    assert f"and {64 - len(servers)} more" in text[-1]


def test_values_of_the_last_steps_are_shown() -> None:
    text = "\n".join(shown(running(2)))
    for part in (
        "4/40 steps",
        "80.0% ▂▂▂▂ 0.75..1",
        "7,900 tokens/s",
        "0.5 mean, 2 max (bound 4)",
        "12 running, 3 finished",
    ):
        assert part in text, part
    assert "7.00 s: wait 14%, inf 29%, train 43%, save 7%, publish 4%, other 3%" in text
    assert "waits for the trainer (bound)" in text


def test_memory_fits_beside_the_longest_curve() -> None:
    progress = running(1, [train(step, reward_mean=0.3 + step / 100) for step in range(1, 41)])
    sizes = {"generation_server/0": 3 << 30, "rollout_worker/0": 200 << 20, "rollout_worker/1": 210 << 20}
    progress.status["workers"] = [{"name": name, "memory_bytes": size} for name, size in sizes.items()]
    assert any(line.endswith("memory     servers 3.0, workers 0.4 GiB") for line in shown(progress, width=79))
    assert any("+0.700 ▂▃▄▄▅▆▆▇ 0.25..0.75  " in line for line in shown(progress, width=79))


def test_first_step_has_no_bar_of_the_warm_up() -> None:
    progress = TrialProgress()
    progress.add([{"kind": "warmup", "step": 420, "total": 420}, {"kind": "phase", "phase": "train", "time": 1.0}])
    assert shown(progress)[1] == "train    the first batch, for 0:00:00"


@pytest.mark.parametrize(("reward", "rows"), [(0.7, 1), (0.8, 0)])
def test_reward_that_is_the_accuracy_has_no_row(reward: float, rows: int) -> None:
    text = shown(running(1, [train(step, reward_mean=reward) for step in (1, 2)]))
    assert sum(line.startswith("reward ") for line in text) == rows


def test_tokens_that_were_not_trained_are_named() -> None:
    untrained = {"stale": 0.0625, "zero_advantage": 0.5}
    text = "\n".join(shown(running(1, [train(1, untrained=untrained, too_old=0.0625)])))
    assert "50.0% zero_advantage" in text and "6.3% stale" in text


def test_connect_names_the_missing_processes() -> None:
    progress = TrialProgress()
    workers = [{"kind": "gserver_manager", "index": 0, "state": "serving"}]
    progress.status = {"workers": [*workers, {"kind": "model_worker", "index": 1, "state": "loading"}]}
    text = shown(progress)
    assert "1/3 processes are ready" in text[1] and "█" in text[1]
    assert text[2] == "waits for model_worker/0, model_worker/1 (loading)"
    assert text[3] == "folder  /shared/runs/arith/t"


def test_evaluation_shows_its_own_progress() -> None:
    progress = running()
    progress.phase = "evaluate"
    progress.status["evaluations"] = {
        "before": {"done": 64, "failed": 0, "total": 64},
        "step-4": {"done": 20, "failed": 1, "total": 32},
    }
    assert "21/32 completions" in shown(progress)[1]


def test_version_before_the_first_is_not_shown() -> None:
    progress = TrialProgress()
    progress.status = {**status(1), "version": -1, "admission": {"admits": False, "reason": "no_server"}}
    text = "\n".join(shown(progress))
    assert "version    -" in text and "no server has weights yet" in text


def test_zero_shares_of_prompts_are_left_out() -> None:
    progress = running()
    progress.status["prompts"] = {"unseen": 0.981, "wrong": 0.019, "between": 0.0, "right": 0.0}
    assert any(line.endswith("prompts    unseen 98%, wrong 2%") for line in shown(progress))


def test_memory_of_servers_and_workers_is_shown() -> None:
    progress = running()
    progress.status["workers"] = [{"name": "generation_server/0", "memory_bytes": 3 << 30}]
    assert any("memory" in line and "servers 3.0 GiB" in line for line in shown(progress))
    progress.status["workers"] = []
    assert not any("memory" in line for line in shown(progress))
