"""Engines on forked ranks, and the plain-torch model to hold them against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedModel

from realsys.algorithm.prefix_tree import shared_beginnings
from realsys.config.allocation import ACTOR, ParallelLayout, parse_allocation
from realsys.config.dataflow import RoleSettings
from realsys.config.fields import Offload
from realsys.config.schema import Config
from realsys.config.schema_train import OptimizerConfig
from realsys.train.megatron.device import Device
from realsys.train.megatron.train_engine import LossFunction, MegatronEngine, Stats
from realsys.train.worker.data_manager import DataManager
from realsys.train.worker.packing import MicroBatch, MicroBatchPacker
from realsys.types import SequenceRef
from tests.support.serving.hf_models import VOCAB
from tests.support.training.sample_records import make_ref, mask_of, prompt_len
from tests.support.training.train_ranks import FORMED, cat_exports, coordinates, run_ranks

TEMPERATURE = 0.7


def make_sequences() -> tuple[list[SequenceRef], dict[str, np.ndarray[Any, Any]]]:
    """Nine sequences of very different length; one has a prompt of one token, one an answer of one.

    Three of a group begin alike.
    """
    rng = np.random.default_rng(5)
    refs, tokens = [], {}
    for i, (prompt, answer) in enumerate([(3, 9), (1, 4), (6, 1), (2, 17), (5, 5), (4, 12), (7, 3), (2, 8), (8, 2)]):
        name = f"t{i}/0"
        refs.append(make_ref(name, prompt + answer, prompt, 1.0, False, i // 3))
        tokens[name] = rng.integers(0, VOCAB, prompt + answer).astype(np.int32)
        if i % 3:
            before = tokens[f"t{i - 1}/0"]
            alike = 3 * min(prompt + answer, len(before)) // 4
            tokens[name][:alike] = before[:alike]
    for first in (0, 3, 6):
        own = refs[first : first + 3]
        found = shared_beginnings([tokens[ref.sample_id] for ref in own])
        refs[first : first + 3] = [replace(ref, shared=shared) for ref, shared in zip(own, found, strict=True)]
    return refs, tokens


REFS, TOKENS = make_sequences()
MASKS = {ref.sample_id: mask_of(ref) for ref in REFS}
ANSWER_TOKENS = sum(ref.loss_tokens for ref in REFS)


def make_config(dtype: str = "float32", **train: Any) -> Config:
    return Config.model_validate(
        {"model": {"dtype": dtype}, "generation": {"sampling": {"temperature": TEMPERATURE}}, "train": train}
    )


def make_settings(
    head: Literal["lm", "value"] = "lm", *, offload: Offload = "none", optimizer: OptimizerConfig | None = None
) -> RoleSettings:
    return RoleSettings(ACTOR, "", head, offload, optimizer or OptimizerConfig())


@dataclass
class Rank:
    """The parts of one rank that the body of a test uses."""

    engine: MegatronEngine
    packer: MicroBatchPacker
    layout: ParallelLayout

    def micro_batches(self, count: int = 2) -> list[MicroBatch]:
        """This data rank's share of the sequences in ``count`` micro-batches. Data rank 0 has most of them."""
        own = REFS if self.layout.data == 1 else (REFS[:6] if self.engine.groups.data_rank == 0 else REFS[6:])
        return [self.packer.pack(own[i::count]) for i in range(count)]

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.export("gradients")}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.export()}


def on_ranks(
    text: str,
    path: Path,
    body: Callable[[Rank], Any],
    config: Config,
    settings: RoleSettings,
    *,
    trainable: bool = True,
) -> list[Any]:
    """``body`` on every rank of layout ``text`` ("d2m2"), with the model of ``path`` loaded; results in rank order."""
    layout = parse_allocation(f"sglang.d1+{text}").actor

    def run(rank: int, device: Device) -> Any:
        engine = MegatronEngine(config, settings, FORMED[ACTOR], device, trainable=trainable)
        engine.load(path)
        data = DataManager(rank)
        for name, tokens in TOKENS.items():
            data.put(name, {"tokens": tokens, "loss_mask": MASKS[name]})
        packer = MicroBatchPacker(
            data,
            device.device,
            multiple=engine.token_multiple,
            first=engine.groups.first_stage,
            last=engine.groups.last_stage,
        )
        return body(Rank(engine, packer, layout))

    return run_ranks(layout.world_size, run, config, layout)


def last_stage_heads(text: str, found: Sequence[Any]) -> list[Any]:
    """The results of tensor rank 0 of the last stage, by data rank."""
    layout = parse_allocation(f"sglang.d1+{text}").actor
    return [f for r, f in enumerate(found) if coordinates(layout, r)[1:] == (0, layout.pipeline - 1)]


def assert_gradients(found: Sequence[Mapping[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> None:
    """``found``: of all ranks."""
    gradients = cat_exports([dict(part) for part in found])
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=2e-6, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


def plain_answers(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all answer tokens, in the order of REFS."""
    logprobs, entropies = [], []
    for ref in REFS:
        ids = torch.from_numpy(TOKENS[ref.sample_id]).long()
        every = (model(ids[None]).logits[0, prompt_len(ref) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        logprobs.append(every.gather(1, ids[prompt_len(ref) :, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def nll_loss(batch: MicroBatch, outputs: Any) -> tuple[torch.Tensor, Stats]:
    """Share of the mean negative log-likelihood over all answer tokens."""
    share = -outputs.logprobs.sum() / ANSWER_TOKENS
    return share, {"loss": share.detach()}


NLL: LossFunction = nll_loss
