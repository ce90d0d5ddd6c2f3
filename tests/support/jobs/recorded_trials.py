"""A trial folder with recorded samples, made without a run: data, tokenizer, settings, one record per step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from realsys.cluster.files import FileInfo
from realsys.config.paths import TrialPaths, write_config
from realsys.data.arith import write_char_tokenizer, write_dataset
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.train import record_files as files
from realsys.types import FinishReason, GroupOrigin, RowOrigin, SampleMeta, Ticket
from tests.support.processes.config_trees import changed
from tests.unit.train.test_record_files import record

CORRECT, WRONG = 5.0, -5.0


@dataclass(frozen=True)
class Trained:
    """One recorded episode: prompt ``index`` and a completion; "{}" in it is the right answer."""

    index: int
    completion: str
    correct: bool
    finish_reason: FinishReason = "stop"


def make_trial(root: Path, steps: dict[int, Sequence[Trained]], *overrides: str) -> TrialPaths:
    """Make the trial ``arith/t`` under ``root``."""
    small = ["data.arith.train_size=20", "data.arith.eval_size=4", "data.arith.demo_size=0", "evaluation.problems=0"]
    rewards = [f"rollout.reward.correct={CORRECT}", f"rollout.reward.wrong={WRONG}"]
    config = changed(f"fileroot={root}", "trial=t", *rewards, *small, *overrides)
    paths = TrialPaths.of(config)
    paths.data.mkdir(parents=True)
    write_dataset(config.data.arith, paths.data, seed=config.seed)
    write_char_tokenizer(paths.start_model)
    write_config(config, paths.config)
    tokenizer = TextTokenizer(paths.start_model)
    prompts = PromptDataset(config, paths, tokenizer)
    for step, samples in steps.items():
        _write_step(paths.records / f"step-{step:08d}", step, samples, prompts, tokenizer)
    return paths


def _write_step(
    directory: Path, step: int, samples: Sequence[Trained], prompts: PromptDataset, tokenizer: TextTokenizer
) -> None:
    arrays, origins, groups = {}, [], []
    for number, sample in enumerate(samples):
        prompt = prompts.prompt("train", sample.index)
        completion = tokenizer.encode_text(sample.completion.replace("{}", prompt.answer))
        name, ticket = f"{number:08d}.0/0.0", f"{number:08d}"
        length, loss = len(prompt.ids) + len(completion), len(completion)
        arrays[name, "tokens"] = np.array([*prompt.ids, *completion], np.int32)
        arrays[name, "loss_mask"] = np.arange(length) >= len(prompt.ids)
        row = [[RowOrigin(sample.finish_reason)]]
        origins.append(GroupOrigin(Ticket(ticket, 0, sample.index), "rollout_worker/0", 1.0, 2.0, {}, row))
        reward = CORRECT if sample.correct else WRONG
        meta = SampleMeta(name, ticket, 0, length, loss, reward, False, 1, 1, 0, correct=sample.correct)
        groups.append([meta])
    directory.mkdir(parents=True)
    content = files.encode_worker_file(0, step, arrays, origins)
    (directory / files.worker_file(0)).write_bytes(content)
    info = FileInfo(len(content), xxhash.xxh3_64_hexdigest(content))
    whole = msgspec.structs.replace(record(step, groups=groups), files={files.worker_file(0): info})
    (directory / files.BATCH).write_bytes(files.RECORD.encode(whole))
