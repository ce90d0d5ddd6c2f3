"""Jobs that train an agent of docs/examples/agents, and the comparison of their rows with what the engine saw."""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from realsys.config.schema import Config
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.backend import EngineParts
from realsys.generation.completion import Completion
from realsys.generation.embedded.backend import EmbeddedBackend
from realsys.generation.protocol import SamplingParams
from realsys.train import record_files
from realsys.types import SampleMeta
from tests.support.jobs.jobs import Job, command, run
from tests.support.needs import lacks

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "docs" / "examples" / "agents"
FRAMEWORKS = ROOT / ".venv-agents" / "bin" / "python"
BOUND_S = 540.0  # bound of a job on a loaded machine; the warm-up needs a minute, the others less
SMALL = [
    "experiment=arith_agents",
    "data.arith.max_operands=3",
    "data.arith.demo_noise=0.4",
    "data.arith.train_size=4000",
    "data.arith.eval_size=32",
    "train.batch_groups=4",
    "rollout.group_size=4",
    "evaluation.problems=0",
    "checkpoint.at_end=false",
]


@dataclass(frozen=True)
class TrainedRow:
    """A row of a recorded step. ``runs``: [start, end) of the tokens that one completion sampled."""

    meta: SampleMeta
    tokens: list[int]
    runs: list[tuple[int, int]]
    logprobs: np.ndarray


@dataclass(frozen=True)
class Trained:
    """A finished job over the recorded engine."""

    job: Job
    calls: Path

    @property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.job.root / "model")

    def rewards(self) -> list[float]:
        return [step["reward_mean"] for step in self.job.records("train")]

    def gradients(self) -> list[float]:
        return [step["stats"]["grad_norm"] for step in self.job.records("train")]

    def signals(self) -> list[bool]:
        """Return for each step True if the rewards of a group differ, so that there is a gradient."""
        records = (record_files.read_record(folder) for folder in self._steps())
        return [any(len({meta.reward for meta in group}) > 1 for group in record.groups) for record in records]

    def errors(self) -> list[str]:
        """Return the errors of all episodes whose groups were trained."""
        return [
            str(error)
            for folder in self._steps()
            for origin in record_files.read_arrays(folder, record_files.read_record(folder))[1]
            for error in origin.errors
        ]

    def rows(self) -> Iterator[TrainedRow]:
        for folder in self._steps():
            record = record_files.read_record(folder)
            arrays, _ = record_files.read_arrays(folder, record)
            for meta in (meta for group in record.groups for meta in group):
                tokens, mask, logprobs = (
                    arrays[meta.sample_id, key] for key in ("tokens", "loss_mask", "behav_logprobs")
                )
                yield TrainedRow(meta, tokens.tolist(), _runs(mask), logprobs)

    def text(self, row: TrainedRow) -> str:
        return self.tokenizer.decode(row.tokens)

    def check_rows(self) -> int:
        """Compare each sampled token of each row with the engine's record; return the number of completions.

        Every completion of a trained episode is in one row, once: its context is what the engine was sent, its tokens
        and log-probs are what the engine returned.
        """
        seen, logprobs = Counter[tuple[int, ...]](), dict[tuple[int, ...], set[bytes]]()
        for line in self.calls.read_text().splitlines():
            call = json.loads(line)
            key = (len(call["sent"]), *call["sent"], *call["tokens"])
            seen[key] += 1
            logprobs.setdefault(key, set()).add(np.float32(call["logprobs"]).tobytes())
        trained, made = Counter[tuple[str, int, int]](), dict[tuple[str, int, int], float]()
        for row in self.rows():
            episode = (row.meta.ticket_id, row.meta.attempt, row.meta.episode)
            made[episode] = row.meta.metrics["gateway/calls"]
            begin = 0
            for start, end in row.runs:
                key = (start, *row.tokens[:end])
                assert seen[key], f"{row.meta.sample_id}: the engine did not see {self.text(row)!r}"
                seen[key] -= 1
                own = row.logprobs[begin : begin + end - start].tobytes()
                assert own in logprobs[key], f"{row.meta.sample_id}: other log-probs than the engine returned"
                begin += end - start
            trained[episode] += len(row.runs)
        assert trained == made, "a completion that the agent received is in no row, or in two"
        return sum(trained.values())

    def _steps(self) -> list[Path]:
        return sorted(self.job.paths.records.glob("step-*"))


def needs_frameworks() -> None:
    """Skip the test without .venv-agents; fail it in `make agents-test`, which makes it."""
    if not FRAMEWORKS.exists():
        lacks(".venv-agents: run `make agents-env`", "REALSYS_PACKAGES")


def warm_up(folder: Path) -> Path:
    """Run the warm-up of the arith model in its chat form; return the model."""
    root = folder / "arith_agents" / "warm"
    settings = ["warmup.steps=200", "warmup.batch=32", "train.total_steps=1"]
    run(root, _command(folder, "warm", *settings), BOUND_S).completed()
    return root / "model"


def train(folder: Path, model: Path, example: str, *overrides: str) -> Trained:
    """Train an example of docs/examples/agents, whose name is that of its module."""
    root, calls = folder / "arith_agents" / example, folder / f"{example}.calls"
    backend = "generation.backend=tests.support.agents.trained:Recorded"
    settings = [backend, f"generation.backend_args.path={calls}", "warmup.steps=0", f"model.path={model}"]
    argv = _command(folder, example, *settings, f"rollout.agent={example}:run", *overrides)
    return Trained(run(root, argv, BOUND_S).completed(), calls)


def _command(folder: Path, trial: str, *overrides: str) -> list[str]:
    return command(*SMALL, f"fileroot={folder}", f"trial={trial}", *overrides)


def _runs(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in list(pairwise(edges))[::2]]


# ---- The embedded engine, which also writes the tokens that it was sent and returned to a file


class Recorded(EmbeddedBackend):
    def __init__(self, config: Config, path: str) -> None:
        super().__init__(config)
        self._path = Path(path)

    def build(self, parts: EngineParts) -> Any:
        return RecordedEngine(super().build(parts), self._path)


class RecordedEngine:
    def __init__(self, engine: Any, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, rid: str, input_ids: Sequence[int], params: SamplingParams, **how: Any
    ) -> Future[list[Completion]]:
        future = self._engine.generate(rid, input_ids, params, **how)
        future.add_done_callback(lambda done: self._record(list(input_ids), done))
        return future

    def _record(self, sent: list[int], done: Future[list[Completion]]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        lines = [
            json.dumps({"sent": sent, "tokens": c.tokens.tolist(), "logprobs": c.logprobs.tolist()})
            for c in done.result()
        ]
        with self._lock, self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
