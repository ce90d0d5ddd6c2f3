"""Held-out accuracy of the arith task, trained by tinker-cookbook's rl_loop with `realsys serve` and by `realsys run`.

    make bench BENCHES=cookbook                           # makes .venv-tinker, whose Python runs this benchmark
    .venv-tinker/bin/python -m benchmarks.cookbook [--seeds 1 2 3] [--steps 40] [--lr 1e-3] [--quick]

Both sides begin with one model, which supervised training has taught to write running sums with mistakes, and train
adapters of one rank on the same prompts. The loop is the one of the package, unchanged, in a process of its own; its
hub cache has the problems in place of GSM8K. ``LIKE_THE_LOOP`` gives `realsys run` the loop's objective and optimizer:

    batch       sampled with the weights that its one optimizer step changes
    advantage   reward minus the mean of the group
    loss        -(sum over tokens of ratio * advantage); a ratio is clipped beyond 11, and it is near 1 here
    optimizer   Adam, constant learning rate; no weight decay, no KL, no clipping of gradients

`realsys run` divides the loss by the tokens that the batch could have. Adam does not notice, if its eps is smaller by
the same factor. tests/contracts/train/worker/test_tenants.py compares single steps of the two.

One evaluator samples all models at temperature 1 on the same held-out problems, with `realsys serve`. ``error_%`` in
``meta`` is the standard error of the difference over the runs, in which these samples are. Results are kept after each
seed, and a seed that is in the file is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks._jobs import REALSYS, records, run_job
from benchmarks._table import RESULTS, report
from realsys.config.paths import TrialPaths
from realsys.config.schema_data import ArithConfig
from realsys.data.arith import Generator, demonstration, prompt_text
from realsys.data.tokenizer import TextTokenizer
from realsys.reward.verifiers.contract import Item
from realsys.serve.settings import new_key, read_settings
from tests.support.jobs.jobs import running

ARITH = ArithConfig(max_operands=6)
TRAIN, HELD_OUT, DEMONSTRATIONS = 4096, 512, 16384
NOISE = 0.15  # as in experiment=arith
GROUPS, GROUP_SIZE, MAX_TOKENS, PROMPT_TOKENS = 32, 8, 64, 160
RANK, ALPHA = 8, 16.0
SAMPLES = 4  # of a held-out problem
EPS = 1e-8  # of the loop
LOOP = "tinker_cookbook.recipes.rl_loop"
#: both sides and the evaluator
SERVED = [
    "allocation=serve.d1p1m1+d1p1m1",
    f"train.lora.rank={RANK}",
    f"train.lora.alpha={ALPHA}",
    "generation.embedded.max_running=256",
    "train.microbatch_tokens=16384",
    f"data.max_prompt_tokens={PROMPT_TOKENS}",
    f"generation.sampling.max_new_tokens={MAX_TOKENS}",
]
LIKE_THE_LOOP = [
    "data.kind=jsonl",
    "data.chat_template=false",
    "data.verifier=benchmarks.cookbook:boxed",
    "warmup.steps=0",
    "evaluation.problems=0",
    "checkpoint.every_steps=0",
    "asynchronous.max_staleness=0",
    "rollout.workers=1",
    f"rollout.max_concurrent={GROUPS}",
    f"rollout.group_size={GROUP_SIZE}",
    f"train.batch_groups={GROUPS}",
    "train.optimizer.beta2=0.95",
    f"train.optimizer.eps={EPS / (GROUPS * GROUP_SIZE * MAX_TOKENS)}",
    "train.optimizer.clip_grad=0.0",
    "train.optimizer.warmup_fraction=0.0",
    "train.ppo.minibatches=1",
    "train.ppo.use_decoupled_loss=false",
    "train.ppo.eps_clip=1.0",
    "train.ppo.eps_clip_higher=10.0",
    "train.ppo.aggregation=constant",
    "train.ppo.advantage.std=none",
]
Problem = tuple[str, int]  # question and value


def boxed(item: Item) -> bool:
    """Judge a completion as rl_loop does: ``data.verifier=benchmarks.cookbook:boxed``."""
    from tinker_cookbook.recipes.math_rl.math_grading import extract_boxed, grade_answer

    try:
        return bool(grade_answer(extract_boxed(item.completion), item.answer))
    except ValueError:
        return False


class Files:
    """Problems, the loop's prompts of them, and the model that both sides begin with."""

    def __init__(self, root: Path, train: int = TRAIN, held_out: int = HELD_OUT) -> None:
        from tests.support.tinker import hub

        self.root, self._hub = root, hub
        self.model_name = hub.NAME
        self.train = self._problems("train", train, held_out=False)
        self.held_out = self._problems("eval", held_out, held_out=True)
        hub.write_hub(Path(os.environ["HF_HOME"]), self.train[:1])
        self._fresh = root / "fresh"
        hub.write_model(self._fresh, steps=0, hidden=128)
        self.tokenizer = TextTokenizer(self._fresh)
        for name, problems in (("train", self.train), ("eval", self.held_out)):
            rows = [{"prompt": self.prompt(text), "answer": str(value)} for text, value in problems]
            self._write(name, rows)

    def _problems(self, stream: str, size: int, *, held_out: bool) -> list[Problem]:
        generator = Generator(ARITH, 1, stream)
        drawn = [generator.operands(held_out) for _ in range(size)]
        return [(prompt_text(operands), sum(operands)) for operands in drawn]

    def _write(self, name: str, rows: Sequence[dict[str, str]]) -> Path:
        path = self.root / f"{name}.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return path

    def tokens(self, question: str) -> list[int]:
        return list(self._hub.rl_prompt(question))

    def prompt(self, question: str) -> str:
        """Return the text of the loop's prompt. Raises ValueError if `realsys run` would make other tokens of it."""
        tokens = self.tokens(question)
        text = self.tokenizer.decode(tokens)
        if self.tokenizer.encode_prompt(text) != tokens:
            raise ValueError(f"the prompt of {question} has other tokens as a text")
        return text

    def shuffled_home(self, seed: int) -> Path:
        """Write a hub cache whose problems are in an order of this seed: the loop takes them as they come."""
        home, rows = self.root / f"home-{seed}", list(self.train)
        random.Random(seed).shuffle(rows)
        self._hub.write_hub(home, rows)
        return home

    def taught(self, steps: int) -> Path:
        """Return the start of both sides: a model that has learned the demonstrations, by `realsys run`."""
        generator, rows = Generator(ARITH, 1, "demos"), []
        for _ in range(DEMONSTRATIONS):
            operands = generator.operands(held_out=False)
            worked, _, value = demonstration(operands, NOISE, generator.rng).response.partition("#")
            rows.append({"prompt": self.prompt(prompt_text(operands)), "response": f"{worked}\\boxed{{{value}}}"})
        settings = [
            f"model.path={self._fresh}",
            f"data.demos={self._write('demos', rows)}",
            "data.chat_template=false",
            f"data.max_prompt_tokens={PROMPT_TOKENS}",
            f"generation.sampling.max_new_tokens={MAX_TOKENS}",
            "allocation=d2p1m1",
            "train.total_epochs=0",
            f"train.total_steps={steps}",
            "train.optimizer.lr=3.0e-3",
            "train.microbatch_tokens=8192",
        ]
        return TrialPaths(run_job(self.root, "taught", settings, experiment="sft")).final_model


@contextmanager
def serving(root: Path, name: str, model: Path, model_name: str) -> Iterator[str]:
    """Serve a model to clients with the key of the environment; yield the address."""
    trial = root / "serve" / name
    keys = root / f"{name}.yaml"
    keys.write_text(f"me: {{key: {os.environ['TINKER_API_KEY']}, models: 64}}", "utf-8")
    words = [f"model.path={model}", f"fileroot={root}", "telemetry.curves_every_s=0", *SERVED]
    options = ["--trial", name, "--model-name", model_name, "--keys", str(keys), "--plain"]
    with running(trial, [*REALSYS, "serve", *words, *options]) as live:
        live.until(lambda: "clients: base_url=" in live.job.stdout, "the service answers")
        yield f"http://127.0.0.1:{read_settings(live.job.paths.serve).port}"


Trained = tuple[list[float], float, float]  # mean rewards of the steps, held-out accuracy, seconds


def right(url: str, files: Files, path: str | None = None) -> float:
    """Return the share of right completions of held-out problems; ``path``: saved weights, None: the model itself."""
    import tinker

    client = tinker.ServiceClient(base_url=url)
    sampler = client.create_sampling_client(model_path=path, base_model=None if path else files.model_name).result()
    params = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    asked = [
        sampler.sample(tinker.ModelInput.from_ints(files.tokens(text)), SAMPLES, params) for text, _ in files.held_out
    ]
    verdicts: list[bool] = []
    for (text, value), future in zip(files.held_out, asked, strict=True):
        texts = [files.tokenizer.completion_text(each.tokens) for each in future.result().sequences]
        verdicts += (boxed(Item(text, completion, str(value))) for completion in texts)
    client.close("success").result()
    return statistics.fmean(verdicts)


def by_realsys(files: Files, start: Path, seed: int, steps: int, lr: float) -> Trained:
    """Train with `realsys run`, whose seed also orders the prompts."""
    began = time.monotonic()
    sources = [f"data.{name}={files.root / f'{name}.jsonl'}" for name in ("train", "eval")]
    own = [f"model.path={start}", f"seed={seed}", f"train.total_steps={steps}", f"train.optimizer.lr={lr}"]
    trial = run_job(files.root, f"run-{seed}", [*SERVED, *LIKE_THE_LOOP, *sources, *own])
    seconds = time.monotonic() - began
    curve = [step["reward_mean"] for step in records(trial, "train")]
    with serving(files.root, f"trained-{seed}", TrialPaths(trial).final_model, files.model_name) as url:
        return curve, right(url, files), seconds


def by_loop(url: str, files: Files, seed: int, steps: int, lr: float) -> Trained:
    """Train with rl_loop and the service at ``url``, which draws the adapter. ``seed`` orders the prompts."""
    began = time.monotonic()
    folder = files.root / f"loop-{seed}"
    settings = {
        "base_url": url,
        "model_name": files.model_name,
        "log_path": folder,
        "loss_fn": "importance_sampling",
        "batch_size": GROUPS,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "max_steps": steps,
        "learning_rate": lr,
        "lora_rank": RANK,
        "save_every": 0,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    env = {**os.environ, "HF_HOME": str(files.shuffled_home(seed))}
    done = subprocess.run([sys.executable, "-m", LOOP, *words], env=env, capture_output=True, text=True, timeout=3600)
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{LOOP} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    curve = [json.loads(line)["reward/total"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    saved = json.loads((folder / "checkpoints.jsonl").read_text().splitlines()[-1])
    return curve, right(url, files, saved["sampler_path"]), seconds


def compared(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return rl_loop minus `realsys run` and its standard error over the runs, in percent."""
    loop, ours = ([100 * row["after"] for row in rows if row["side"] == side] for side in ("rl_loop", "realsys"))
    difference = statistics.fmean(loop) - statistics.fmean(ours)
    enough = len(loop) > 1 and len(ours) > 1
    error = math.hypot(*(statistics.stdev(each) / math.sqrt(len(each)) for each in (loop, ours))) if enough else None
    return {"difference_%": round(difference, 2), "error_%": error and round(error, 2)}


def kept_rows(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in the result file; none if it was made with other settings."""
    path = RESULTS / "cookbook.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {"meta": {}, "rows": []}
    same = all(found["meta"].get(name) == value for name, value in settings.items())
    return list(found["rows"]) if same else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--taught", type=int, default=400, help="supervised steps before")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--quick", action="store_true", help="one seed, two steps, a model that knows nothing; no file")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps, options.taught = [1], 2, 2
    settings = {name: getattr(options, name) for name in ("steps", "taught", "lr")}
    settings |= {"samples": SAMPLES, "served": SERVED, "like_the_loop": LIKE_THE_LOOP}
    root = Path(tempfile.mkdtemp(prefix="cookbook_"))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    os.environ.update(offline, HF_HOME=str(root / "home"), PYTHONPATH=str(Path(__file__).parents[1]))
    os.environ["TINKER_API_KEY"] = new_key()
    done = {row["seed"] for row in kept_rows(settings)}
    try:
        files = Files(root, held_out=16 if options.quick else HELD_OUT)
        start = files.taught(options.taught)
        with serving(root, "start", start, files.model_name) as url:
            before = right(url, files)
            for seed in [each for each in options.seeds if each not in done]:
                rows = []
                for side in ("realsys", "rl_loop"):
                    if side == "realsys":
                        curve, after, seconds = by_realsys(files, start, seed, options.steps, options.lr)
                    else:
                        curve, after, seconds = by_loop(url, files, seed, options.steps, options.lr)
                    rows.append({"side": side, "seed": seed, "before": before, "after": after})
                    rows[-1] |= {"seconds": round(seconds), "curve": [round(reward, 4) for reward in curve]}
                    print(rows[-1], flush=True)
                if not options.quick:
                    rows = sorted([*kept_rows(settings), *rows], key=lambda row: (row["side"], row["seed"]))
                    report("cookbook", rows, {**compared(rows), **settings})
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
