"""Losses of TRL's trainers on random batches, for the comparison with those of realsys.

    python -m venv .venv-trl && .ci/install .venv-trl trl==1.16.0 torch==2.13.0
    .venv-trl/bin/python tests/support/training/trl_losses.py

writes ``trl_losses.json`` next to this file. It calls TRL's own methods; only the models are replaced, by the numbers
that they return. Both sides make the same batch of a seed, in float64, with numpy alone.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

FILE = Path(__file__).with_suffix(".json")
SEEDS = 1000
F64 = npt.NDArray[np.float64]

#: columns of a row of the file
COLUMNS = (
    *("sft", "sigmoid", "conservative", "hinge", "ipo", "accuracy", "margin"),
    *("reward", "reward_centered", "reward_accuracy", "reward_margin"),
)


class Batch:
    """Random log-probs of pairs, and scores.

    policy, reference   log-probs of the tokens after the first, [2n, t - 1]: the chosen responses, then the rejected
    mask                True at the tokens of the responses, [2n, t]; never at the first one
    scores              of a reward model, [2n]
    beta, smoothing, center   arguments of the losses
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.pairs, self.tokens = int(rng.integers(1, 9)), int(rng.integers(3, 40))
        shape = (2 * self.pairs, self.tokens - 1)
        self.policy: F64 = -rng.exponential(rng.choice([0.1, 1.0, 5.0]), shape)
        self.reference: F64 = np.minimum(0.0, self.policy + rng.normal(0, rng.choice([0.01, 0.3, 2.0]), shape))
        starts, stops = rng.integers(1, self.tokens, shape[0]), rng.integers(1, self.tokens, shape[0])
        at = np.arange(self.tokens)
        first, last = np.minimum(starts, stops)[:, None], np.maximum(starts, stops)[:, None]
        self.mask = (at >= first) & (at <= last)
        self.scores: F64 = rng.normal(0, rng.choice([0.1, 1.0, 10.0]), shape[0])
        self.beta = float(rng.choice([0.01, 0.1, 0.5, 2.0]))
        self.smoothing = float(rng.uniform(0, 0.49))
        self.center = float(rng.choice([0.001, 0.01, 0.5]))


# ---------------------------------------------------------------- TRL's side; needs torch and trl


def _rows() -> Iterator[list[float]]:
    import torch
    from trl import DPOTrainer, RewardTrainer, SFTTrainer

    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x, parallelism_config=None
    )

    class Model(torch.nn.Module):
        """Returns the same outputs for any inputs."""

        is_gradient_checkpointing = False

        def __init__(self, **outputs: torch.Tensor) -> None:
            super().__init__()
            self.outputs = SimpleNamespace(**outputs)

        def forward(self, **_: Any) -> SimpleNamespace:
            return self.outputs

    def scored(logprobs: F64, mask: Any) -> Model:
        """As TRL's head returns them: 0 at tokens that are not labels."""
        label = torch.from_numpy(mask[:, 1:])
        values = torch.from_numpy(logprobs).masked_fill(~label, 0.0)
        zeros = torch.zeros_like(values)
        return Model(log_probs=values, label_mask=label, entropy=zeros, mean_logits=zeros, is_top1=label)

    def trainer(model: Model, **settings: Any) -> Any:
        """What the methods read of their trainer."""
        common = {"aux_loss_enabled": False, "_metrics": defaultdict(lambda: defaultdict(list))}
        return SimpleNamespace(
            model=model, accelerator=accelerator, _total_train_tokens=0, _tp_size=1, **common, **settings
        )

    def dpo(batch: Batch, kind: str, rows: Any = slice(None)) -> tuple[float, dict[str, list[float]]]:
        mask = batch.mask[rows]
        policy, reference = scored(batch.policy[rows], mask), scored(batch.reference[rows], mask)
        own = trainer(
            policy,
            ref_model=reference,
            args=SimpleNamespace(gradient_checkpointing_kwargs=None),
            ld_alpha=None,
            precompute_ref_logps=False,
            f_divergence_type="reverse_kl",
            loss_types=[kind],
            loss_weights=[1.0],
            beta=batch.beta,
            label_smoothing=batch.smoothing,
            use_weighting=False,
        )
        completions = torch.from_numpy(mask).long()
        inputs = {
            "input_ids": torch.zeros_like(completions),
            "attention_mask": torch.ones_like(completions),
            "completion_mask": completions,
        }
        loss = DPOTrainer._compute_loss(own, policy, inputs, False)
        return loss.item(), own._metrics["train"]

    def reward(batch: Batch, center: float | None) -> tuple[float, dict[str, list[float]]]:
        model = Model(logits=torch.from_numpy(batch.scores)[:, None])
        own = trainer(model, args=SimpleNamespace(center_rewards_coefficient=center))
        loss = RewardTrainer.compute_loss(own, model, {"attention_mask": torch.ones(1)})
        return loss.item(), own._metrics["train"]

    def sft(batch: Batch) -> float:
        model = scored(batch.policy, batch.mask)
        args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
        own = trainer(model, args=args, compute_loss_func=None, label_smoother=None)
        loss: float = SFTTrainer.compute_loss(own, model, {"attention_mask": torch.ones(1)}).item()
        return loss

    for seed in range(SEEDS):
        batch = Batch(seed)
        sigmoid, stats = dpo(batch, "sigmoid")
        # TRL's sigmoid loss has no label smoothing. Of a single pair its loss "aot" is the conservative one.
        alone = [dpo(batch, "aot", [pair, pair + batch.pairs])[0] for pair in range(batch.pairs)]
        plain, reward_stats = reward(batch, None)
        yield [
            sft(batch),
            sigmoid,
            float(np.mean(alone)),
            dpo(batch, "hinge")[0],
            dpo(batch, "ipo")[0],
            stats["rewards/accuracies"][0],
            stats["rewards/margins"][0],
            plain,
            reward(batch, batch.center)[0],
            reward_stats["accuracy"][0],
            reward_stats["margin"][0],
        ]


def main() -> None:
    import trl

    lines = [json.dumps([float(f"{value:.10g}") for value in row]) for row in _rows()]
    head = f'{{"trl": "{trl.__version__}",\n"columns": {json.dumps(COLUMNS)},\n"rows": [\n'
    FILE.write_text(head + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
