"""A small trial folder with everything that the page and the sample viewer show, some of it hostile."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from realsys.cluster.files import FileInfo
from realsys.config.paths import TrialPaths, write_config
from realsys.data.arith import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.observe.dropped_groups import DroppedGroup, Room, write_group
from realsys.observe.evaluation_records import EvalSample, write_result
from realsys.train import record_files as files
from realsys.train.record_files import StepRecord
from realsys.types import GroupOrigin, Row, RowOrigin, SampleMeta, Ticket
from tests.support.processes.config_trees import changed

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
START = 1_700_000_000.0
STEPS = 40
PROMPTS = ("1+2=", "what is 3+4 ?")
ANSWERS = ("3", "7")
AGREEMENT = {"tokens": 900, "difference_mean": 2e-6, "difference_max": 1e-4, "warning": ""}


def sample_trial(root: Path) -> TrialPaths:
    """Write the trial demo/shown under ``root``: 40 steps, a restart, evaluations, samples of the last step."""
    paths = TrialPaths(root / "demo" / "shown")
    paths.data.mkdir(parents=True)
    config = changed()
    config = config.model_copy(update={"experiment": "demo", "trial": "shown", "fileroot": str(root)})
    write_config(config, paths.config)
    paths.start_model.mkdir()
    write_char_tokenizer(paths.start_model, chat=True)
    lines = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    for name in ("train", "eval", "demos"):
        own = lines if name == "train" else [{"prompt": f"{name} 5+5=", "answer": "10"}]
        (paths.data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    _append(paths.steps, step_log())
    _append(paths.events, events())
    tokenizer = TextTokenizer(paths.start_model)
    write_step(paths, tokenizer, config.model_dump(mode="json"))
    write_evaluations(paths)
    write_dropped(paths, tokenizer)
    paths.summary.write_text(json.dumps({"status": "done", "reason": "all steps are done"}))
    return paths


def step_log() -> list[dict[str, Any]]:
    """Return the records of a run that went back from step 23 to step 20."""
    made: list[dict[str, Any]] = [{"kind": "phase", "phase": "train", "time": START}, evaluation("before", 0, 0.41)]
    numbers = [*range(1, 24), *range(21, STEPS + 1)]
    for place, step in enumerate(numbers):
        if place == 23:
            made.append({"kind": "recovered", "step": 20, "time": START + 3.1 * place})
        made.append(train_step(step, START + 3.1 * (place + 1)))
    made.insert(-15, evaluation("step-20", 20, 0.58))
    made.append(evaluation("after", STEPS, 0.74))
    made.append(evaluation("after", STEPS, None, of_set="sums"))
    made.append({"kind": "phase", "phase": "done", "time": START + 450})
    return made


def train_step(step: int, at: float) -> dict[str, Any]:
    """Return the record of one step, with numbers that look like those of a run."""
    wave = ((step * 37) % 11 - 5) / 100
    return {
        "kind": "train", "step": step, "total": STEPS, "time": at, "version": step,
        "reward_mean": 0.4 + step / 100 + wave, "accuracy": 0.4 + step / 100 + wave,
        "length_mean": 40 + step / 3, "length_correct": 32 + step / 4,
        "length_wrong": 60 + step / 2, "truncated_fraction": 0.01, "length_biased": step in (1, 2, STEPS),
        "consumed_tokens_per_s": 9000 + 300 * wave, "train_tokens_per_s": 16000.0,
        "stats": {"kl_prox_theta_mean": 1e-3, "kl_behav_prox_mean": 2e-3 + wave / 100,
                  "entropy_mean": 0.5 / (1 + step / 20), "loss": -0.01 + wave / 10,
                  "grad_norm": 0.3 + wave, "clip_fraction": 0.004},
        "seconds": {"wait": 1.4, "inf": 0.4, "train": 1.1, "save": 0.02, "publish": 0.05, "total": 3.0},
        "staleness": {"min": 0, "mean": 1.5, "max": 3, "histogram": {"0": 12, "1": 20, "2": 24, "3": 8}},
        "untrained": {"zero_advantage": 0.25},
        "agreement": {**AGREEMENT, "version": step - 1},
    }  # fmt: skip


def evaluation(name: str, step: int, accuracy: float | None, of_set: str = "eval") -> dict[str, Any]:
    """Return the record of an evaluation; without ``accuracy`` it is incomplete."""
    numbers = {"accuracy": accuracy, "interval": accuracy and [accuracy - 0.04, accuracy + 0.04]}
    incomplete = "" if accuracy is not None else "3 of 96 failed"
    common = {"eval_id": name, "set": of_set, "step": step, "version": step, "problems": 96, "samples": 1}
    return {
        "kind": "eval",
        **common,
        **numbers,
        "complete": not incomplete,
        "incomplete": incomplete,
        "length_mean": 9.0,
    }


def events() -> list[dict[str, Any]]:
    restart = {"time": START + 71.5, "kind": "restart", "process": "model_worker/0", "text": f"was killed: {HOSTILE}"}
    return [
        {"time": START - 5, "kind": "start", "text": "new trial", "process": ""},
        restart,
        {"time": START + 460, "kind": "stop", "text": "all steps are done", "process": ""},
    ]


def write_step(paths: TrialPaths, tokenizer: TextTokenizer, config: dict[str, Any]) -> None:
    """Write the record of the last step: two prompts with two episodes; the last one has two turns."""
    texts = [
        [("1+2=", "#3", ""), ("1+2=", HOSTILE, "")],
        [("what is 3+4 ?", "#8", ""), ("what is 3+4 ?", "#6", "wrong, try again"), ],
    ]  # fmt: skip
    arrays: dict[tuple[str, str], np.ndarray] = {}
    groups: list[list[SampleMeta]] = []
    origins: list[GroupOrigin] = []
    for prompt, episodes in enumerate(texts):
        ticket = Ticket(f"{prompt:010d}", 0, prompt, version=STEPS - 3, seed=7, n=2)
        metas: list[SampleMeta] = []
        rows: list[list[RowOrigin]] = []
        for k, (before, completion, feedback) in enumerate(episodes):
            name = f"{ticket.ticket_id}.0/{k}.0"
            row = _row(
                tokenizer,
                [(before, False), (completion, True), *([(feedback, False), ("#7", True)] if feedback else [])],
            )
            arrays |= {(name, key): array for key, array in row.items()}
            tokens, right = len(row["behav_logprobs"]), (prompt, k) in ((0, 0), (1, 1))
            metas.append(
                SampleMeta(
                    name, ticket.ticket_id, 0, len(row["tokens"]), tokens, float(right), k == 1 and prompt == 0,
                    int(row["versions"].min()), STEPS - 1, 0, episode=k, correct=right, metrics={"turns": 1.0},
                )
            )  # fmt: skip
            rows.append([RowOrigin("length" if k == 1 and prompt == 0 else "stop", (("generation_server/0", tokens),))])
        groups.append(metas)
        origins.append(GroupOrigin(ticket, "rollout_worker/0", START, START + 2, {}, rows))
    content = files.encode_worker_file(0, STEPS, arrays, origins)
    directory = paths.records / f"step-{STEPS:08d}"
    directory.mkdir(parents=True)
    (directory / files.worker_file(0)).write_bytes(content)
    info = FileInfo(len(content), xxhash.xxh3_64_hexdigest(content))
    record = StepRecord(
        files={files.worker_file(0): info}, step=STEPS, version=STEPS - 1, seed=1, incarnation="i", groups=groups,
        calls=[], plan="", args={}, stats={}, scores={}, weights={}, time=START, config=config,
    )  # fmt: skip
    (directory / files.BATCH).write_bytes(files.RECORD.encode(record))


def _row(tokenizer: TextTokenizer, turns: Sequence[tuple[str, bool]]) -> dict[str, np.ndarray]:
    """Return the arrays of a row of (text, sampled) turns; its tokens have two versions."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, sampled in turns:
        own = tokenizer.encode_text(text)
        ids += own
        mask += [sampled] * len(own)
    count = sum(mask)
    return {
        "tokens": np.array(ids, np.int32),
        "loss_mask": np.array(mask),
        "behav_logprobs": -np.linspace(0.01, 4.0, count, dtype=np.float32),
        "versions": np.array([STEPS - 3 + (place >= count / 2) for place in range(count)], np.int32),
        "advantages": np.linspace(-1.0, 1.0, count, dtype=np.float32),
    }


def write_evaluations(paths: TrialPaths) -> None:
    """Write the completions of one evaluation."""
    made = [
        EvalSample(
            "after", "eval", problem, 0, 0, STEPS, STEPS, f"5+{problem}=", HOSTILE if problem else "#5",
            str(5 + problem), float(not problem), not problem, "stop", 2 + problem, worker="rollout_worker/0",
        )
        for problem in range(3)
    ]  # fmt: skip
    write_result(paths.evaluations / f"after-{STEPS}", made, evaluation("after", STEPS, 0.74))


def write_dropped(paths: TrialPaths, tokenizer: TextTokenizer) -> None:
    """Write a group that was too old, one without a signal, and one whose verifier failed."""
    arrays = _row(tokenizer, [("1+2=", False), ("#3", True)])
    row = Row(arrays["tokens"], arrays["loss_mask"], arrays["behav_logprobs"], arrays["versions"], "stop")
    old = Ticket(f"{79:010d}", 0, 0, n=2)
    masked = Room().episode(0, [row], 1.0, True)
    group = DroppedGroup(time.time(), old, "rollout_worker/0", "masked", "", None, [masked], next_version=STEPS + 3)
    write_group(paths.dropped / "model_worker-0", group, 64)
    for number, (reason, error) in enumerate(
        (("equal_rewards", ""), ("RewardError: no verdict", f"RewardError: {HOSTILE}"))
    ):
        episode = Room().episode(0, [row], None if error else 1.0, None if error else True, error)
        ticket = Ticket(f"{80 + number:010d}", 0, 0, n=2)
        group = DroppedGroup(time.time(), ticket, "rollout_worker/0", reason, "1+2=", "3", [episode])
        write_group(paths.dropped / "rollout_worker-0", group, 64)


def _append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def live_status(servers: int, bad: int = 0) -> dict[str, Any]:
    """Return the body of GET /status of a manager with as many servers; the last ``bad`` are in quarantine."""
    rows = [_server(k, bad=k >= servers - bad) for k in range(servers)]
    times = {"total_s": 1.3, "stage_s": 1.1, "verify_s": 0.4, "pause_s": 0.05, "load_s": 0.02, "first_token_s": 0.01}
    updates = [{"server": row["name"], "version": 39, "began": START, "error": "", **times} for row in rows[:6]]
    return {
        "phase": "train", "step": STEPS, "version": 39, "max_staleness": 4,
        "admission": {"batch_groups": 64, "counted": 2700, "capacity": 2816, "headroom": 116, "admits": True,
                      "reason": None, "explanation": "granting"},
        "servers": rows,
        "devices": {"turn": "unknown", "reason": ""},
        "pins": {"opponent": {"version": 0, "servers": ["generation_server/0"]}},
        "rollout": {"mode": "all_at_once", "fraction": 1.0, "at_newest": servers - bad, "servers": servers,
                    "failures": bad, "updates": updates},
        "workers": [_worker(k) for k in range(max(4, servers // 2))],
        "blame": {"suspects": {}, "ignored": 0},
        "ledger": {"inherited": 0, "granted": 2760, "attempts": 2790, "running": 90, "finished": 110, "claimed": 0,
                   "waiting": 0, "trained": 2496, "dropped": 64,
                   "dropped_by_reason": {"equal_rewards": 60, "failed": 4},
                   "reissued_by_cause": {"lease": 30}},
        "staleness": {"histogram": {"0": 120, "1": 260, "2": 310, "3": 70}, "steps": []},
        "throughput": {"generated_tokens_per_s": 1300.0 * servers, "train_tokens_per_s": 16000.0},
        "agreement": {**AGREEMENT, "version": 39}, "kept_keys_fraction": 0.0,
        "untrained": {"untrained": {"zero_advantage": 0.25}},
        "evaluations": {"step-40": {"done": 21, "total": 32, "ended": False, "accuracy": 1.0, "length_mean": 25.1}},
    }  # fmt: skip


def _server(k: int, *, bad: bool) -> dict[str, Any]:
    updating = k % 16 == 5 and not bad
    return {
        "name": f"generation_server/{k}", "url": f"http://10.0.0.{k}:4000", "host": f"node{k // 8}", "pid": 900 + k,
        "state": "quarantined" if bad else "updating" if updating else "ready", "version": 39,
        "target": 40 if updating else None, "running": 30 + k % 7, "tokens_per_s": 1200.0 + 10 * k, "updates": 39,
        "update_s": 1.25, "timings": {"pause_s": 0.05}, "failures": 0,
        "load": {"queued": k % 3, "kv_tokens": 700, "kv_capacity": 1000},
        "error": f"connection refused: {HOSTILE}" if bad else "",
    }  # fmt: skip


def _worker(k: int) -> dict[str, Any]:
    return {
        "name": f"rollout_worker/{k}", "kind": "rollout_worker", "index": k, "host": f"node{k // 8}", "pid": 50 + k,
        "state": "rolling out", "up_s": 700.0, "unchanged_s": 91.0 if k == 3 else 1.0, "running": 12, "refused": {},
    }  # fmt: skip
