"""Tokens per second of the packed PPO step against a plain ``transformers`` loop with padding.

    python -m benchmarks.train_step [--presets arith 10m] [--limit 512] [--sequences 48] [--repeats 3]

A step is what a train step does to one minibatch: proximal log-probs (a forward pass), then loss, backward pass,
gradient clipping and Adam. Ours goes through the product's interfaces, actor_inf and actor_train. The other is the loop
that one would write: micro-batches of a fixed number of sequences, padded on the right to the longest in each, SDPA
attention, ``torch.optim.AdamW``; the same tokens, the same decoupled PPO loss, the same single thread and clock.

    padded          micro-batches of 8 in order of arrival; --tokens bounds ours by the same memory
    padded_best     the fastest of 1, 2 and 4 in a micro-batch: less padding, more calls
    padded_sorted   micro-batches of 8 in order of length, which saves padding but is not how a loader hands them out
    realsys         ours

``speedup`` is theirs / ours: the median over repetitions, in which all take turns, with the least and the greatest.
All of them start from the same weights and take the same steps; loss and gradient norm of every step must agree to
1e-4, else the run fails. ``real_%`` is the share of computed positions that are no padding.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks._table import report
from benchmarks._training import (
    PRESETS,
    RAW_ADVANTAGES,
    Samples,
    clock_of,
    make_batch,
    make_model,
    request,
    single_rank,
    timed,
)
from realsys.config.schema import Config
from realsys.config.schema_train import OptimizerConfig
from realsys.train.megatron.device import Device, prepare_device
from realsys.train.worker.call_handlers import Role, find_handler
from realsys.types import SequenceRef
from tests.support.training.lengths import heavy_lengths

PER_BATCH = 8
LR = 1e-5
EPS_CLIP = 0.2
TOLERANCE = 1e-4  # relative, of loss and gradient norm


@dataclass(frozen=True, slots=True)
class Step:
    """Results that must be equal for every implementation."""

    loss: float
    grad_norm: float

    def check(self, other: Step, who: str) -> None:
        for name in ("loss", "grad_norm"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if not math.isclose(mine, theirs, rel_tol=TOLERANCE):
                raise SystemExit(f"{who}: {name} {theirs} is not ours, {mine}")


class PaddedLoop:
    """PPO in plain torch over a ``transformers`` model."""

    def __init__(self, directory: Path, optimizer: OptimizerConfig, per_batch: int, *, by_length: bool) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=LR,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self._clip = optimizer.clip_grad
        self._per_batch, self._by_length = per_batch, by_length

    def collate(self, refs: Sequence[SequenceRef], samples: Samples) -> list[dict[str, torch.Tensor]]:
        """Micro-batches [b, t] of tokens, mask of tokens, mask of answer tokens, recorded log-probs, advantages."""
        ordered = sorted(refs, key=lambda ref: ref.length) if self._by_length else list(refs)
        batches = []
        for start in range(0, len(ordered), self._per_batch):
            chunk = ordered[start : start + self._per_batch]
            shape = (len(chunk), max(ref.length for ref in chunk))
            ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
            answer, behav, advantage = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
            for row, ref in enumerate(chunk):
                ids[row, : ref.length] = torch.from_numpy(samples[ref.sample_id]["tokens"])
                mask[row, : ref.length] = 1
                answer[row, ref.length - ref.loss_tokens : ref.length] = 1
                behav[row, ref.length - ref.loss_tokens : ref.length] = torch.from_numpy(
                    samples[ref.sample_id]["behav_logprobs"]
                )
                advantage[row] = ref.reward
            batches.append({"ids": ids, "mask": mask, "answer": answer, "behav": behav, "advantage": advantage})
        return batches

    def step(self, refs: Sequence[SequenceRef], samples: Samples) -> Step:
        batches = self.collate(refs, samples)
        with torch.no_grad():
            proximal = [self._logprobs(batch) for batch in batches]
        total = sum(batch["answer"].sum() for batch in batches)
        self._optimizer.zero_grad()
        summed = 0.0
        for batch, prox in zip(batches, proximal, strict=True):
            theta = self._logprobs(batch)
            answer, behav, advantage = (batch[name][:, 1:] for name in ("answer", "behav", "advantage"))
            ratio, weight = (theta - prox).exp(), (prox - behav).exp()
            clipped = ratio.clamp(1 - EPS_CLIP, 1 + EPS_CLIP)
            token_loss = -weight * torch.minimum(ratio * advantage, clipped * advantage)
            loss = (token_loss * answer).sum() / total
            torch.autograd.backward(loss)
            summed += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        return Step(summed, norm.item())

    def _logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """[b, t - 1] of the tokens after the first."""
        logits = self._model(batch["ids"], attention_mask=batch["mask"]).logits[:, :-1]
        logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, batch["ids"][:, 1:, None])[..., 0]
        return logprobs

    def positions(self, refs: Sequence[SequenceRef], samples: Samples) -> int:
        return sum(batch["ids"].numel() for batch in self.collate(refs, samples))


def our_step(role: Role, refs: Sequence[SequenceRef]) -> Step:
    find_handler("actor_inf").run(role, request("actor_inf", [refs]))
    stats = find_handler("actor_train").run(role, request("actor_train", [refs], lr=LR)).stats
    return Step(stats["loss"], stats["grad_norm"])


def make_config(options: argparse.Namespace) -> Config:
    ppo = {"advantage": RAW_ADVANTAGES, "eps_clip": EPS_CLIP, "minibatches": 2}
    optimizer = {"lr": LR, "weight_decay": 0.0}  # which parameters decay differs between the two
    return Config.model_validate({"train": {"microbatch_tokens": options.tokens, "ppo": ppo, "optimizer": optimizer}})


def measure(preset: str, options: argparse.Namespace, device: Device) -> list[dict[str, Any]]:
    """A row per way of computing the step."""
    sizes, config = PRESETS[preset], make_config(options)
    lengths = heavy_lengths(options.sequences, options.limit, options.seed)
    refs, samples = make_batch(lengths.tolist(), sizes.outputs, options.seed)
    _, clock = clock_of(device)
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        parameters = make_model(sizes, model, positions=options.limit)

        def loop(per_batch: int, *, by_length: bool = False) -> PaddedLoop:
            return PaddedLoop(model, config.train.optimizer, per_batch, by_length=by_length)

        trials = {n: _fastest(loop(n), refs, samples, clock) for n in (1, 2, 4)}
        best = min(trials, key=trials.__getitem__)
        loops = {
            f"padded ({PER_BATCH})": loop(PER_BATCH),
            f"padded_best ({best})": loop(best),
            f"padded_sorted ({PER_BATCH})": loop(PER_BATCH, by_length=True),
        }
        with single_rank(config, model, device) as role:
            for name, arrays in samples.items():
                role.data.put(name, arrays)
            for repetition in range(options.repeats + 1):
                elapsed, ours = timed(partial(our_step, role, refs), clock)
                found = {"realsys": elapsed}
                for name, other in loops.items():
                    found[name], step = timed(partial(other.step, refs, samples), clock)
                    ours.check(step, name)
                if repetition:  # the first warms up
                    for name, value in found.items():
                        seconds.setdefault(name, []).append(value)
            computed = {name: other.positions(refs, samples) for name, other in loops.items()}
    return [
        _row(name, times, seconds["realsys"], int(lengths.sum()), computed.get(name))
        | {"model": preset, "parameters": parameters}
        for name, times in seconds.items()
    ]


def _fastest(loop: PaddedLoop, refs: Sequence[SequenceRef], samples: Samples, clock: Callable[[], float]) -> float:
    return min(timed(partial(loop.step, refs, samples), clock)[0] for _ in range(2))


def _row(name: str, times: list[float], ours: list[float], tokens: int, computed: int | None) -> dict[str, Any]:
    ratios = [theirs / own for theirs, own in zip(times, ours, strict=True)]
    return {
        "model": "",
        "parameters": 0,
        "step": name,
        "real_%": round(100 * tokens / (computed or tokens), 1),
        "s/step": round(statistics.median(times), 4),
        "tokens/s": round(tokens / statistics.median(times)),
        "speedup": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "greatest": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=["arith", "1m", "10m"], default=["arith", "10m"])
    parser.add_argument("--tokens", type=int, default=4096, help="capacity of our micro-batches")
    parser.add_argument("--limit", type=int, default=512, help="tokens of the longest sequence")
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    device = prepare_device(0, 1)
    rows = [row for preset in options.presets for row in measure(preset, options, device)]
    meta = {key: getattr(options, key) for key in ("tokens", "limit", "sequences", "repeats", "seed")}
    report("train_step", rows, {"time": clock_of(device)[0], "lr": LR, **meta})


if __name__ == "__main__":
    main()
