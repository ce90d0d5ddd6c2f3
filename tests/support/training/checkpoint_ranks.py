"""A role trained, saved and loaded on real ranks: what the tests of checkpoints share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron.core.optimizer as megatron_optimizer
import numpy as np
import torch
from megatron.core.optimizer import distrib_optimizer

from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.manager.messages import DataPosition
from realsys.train.checkpoint.checkpoint_files import CheckpointState, RoleState, rank_stem
from realsys.train.checkpoint.saver import CheckpointWriter, load_checkpoint
from realsys.train.master.checkpoints import commit
from realsys.train.megatron import train_engine
from realsys.train.megatron.device import Device
from realsys.train.megatron.heads import Outputs
from realsys.train.megatron.train_engine import Stats
from realsys.train.worker.call_handlers import Role
from realsys.train.worker.packing import MicroBatch
from tests.support.serving.hf_models import VOCAB, make_model
from tests.support.training.sample_records import make_ref, mask_of
from tests.support.training.train_ranks import build_role, run_ranks

BEFORE, AFTER, LR = 3, 2, 1e-3
State = dict[str, Any]


def make_models(root: Path) -> dict[str, Path]:
    """Directories of random Qwen2 models, by name."""
    models = {"untied": make_model(), "tied": make_model(tied=True), "wider": make_model(hidden_size=64)}
    models["odd"] = make_model(vocab_size=VOCAB + 1, tied=True)  # padded over two tensor ranks
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


SINGLE = ParallelLayout()


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Transformer Engine and Apex keep it: the count of steps is in the group, not in a parameter's state."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, adam_w_mode: bool, **_: Any
    ) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        (beta1, beta2), grad = group["betas"], parameter.grad
        assert grad is not None
        mean = state["exp_avg"].lerp_(grad, 1 - beta1) / (1 - beta1 ** group["step"])
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2) / (1 - beta2 ** group["step"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-group["lr"])


@dataclass(frozen=True)
class Setup:
    """Layout and settings with which a role is trained."""

    layout: ParallelLayout = SINGLE
    distributed: bool = False
    dtype: str = "float32"
    model: str = "untied"
    optimizer: str = "adam"
    lora: int = 0
    fused: bool = False  # Megatron finds a fused Adam
    one_kernel: bool = False  # torch's Adam runs fused, as on a GPU
    algorithm: str = "ppo"

    def __str__(self) -> str:
        names = [str(self.layout), self.dtype, self.model, self.optimizer]
        return "-".join(
            [
                *names,
                *["distributed"] * self.distributed,
                *[f"lora{self.lora}"] * bool(self.lora),
                *["fused"] * self.fused,
                *["one_kernel"] * self.one_kernel,
                *[self.algorithm] * (self.algorithm != "ppo"),
            ]
        )

    @property
    def config(self) -> Config:
        optimizer = {"name": self.optimizer, "lr": LR, "eps": 1e-6, "clip_grad": 1.0, "weight_decay": 0.1}
        train = {
            "microbatch_tokens": 64,
            "distributed_optimizer": self.distributed,
            "optimizer": optimizer,
            "lora": {"rank": self.lora},
            "ppo": {"algorithm": self.algorithm},
        }
        return Config.model_validate({"model": {"dtype": self.dtype}, "train": train})

    def run(self, body: Callable[[Role], Any], model: Path) -> list[Any]:
        """``body`` on every rank, in fresh processes."""
        config, layout = self.config, self.layout

        def on_rank(rank: int, device: Device) -> Any:
            if self.fused:  # in this forked process only
                vars(megatron_optimizer).update(Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
                distrib_optimizer.Adam = FusedAdam
            if self.one_kernel:
                vars(train_engine)["_runs_fused"] = lambda parameter: True
            return body(build_role(config, layout, rank, device, model))

        return run_ranks(layout.world_size, on_rank, config, layout)


def train(role: Role, steps: range) -> None:
    """Take one optimizer step per number, each on another batch: likelihood of random tokens, or squared values."""
    layout = role.groups.mesh.layout
    for step in steps:
        rng = np.random.default_rng(step)
        refs = []
        for i in range(6):
            answer = int(rng.integers(2, 14))
            refs.append(make_ref(f"{step}/{i}", 3 + answer, 3, 0.0, False, i))
            tokens = rng.integers(0, VOCAB, 3 + answer).astype(np.int32)
            role.data.put(refs[-1].sample_id, {"tokens": tokens, "loss_mask": mask_of(refs[-1])})
        tokens = sum(ref.loss_tokens for ref in refs)

        def loss(batch: MicroBatch, outputs: Outputs, tokens: int = tokens) -> tuple[torch.Tensor, Stats]:
            found = outputs.logprobs if outputs.values is None else -((outputs.values - 1.0) ** 2)
            assert found is not None
            return -found.sum() / tokens, {}

        role.engine.use_optimizer("train", role.settings.optimizer)
        role.engine.accumulate(role.microbatches([refs[d :: layout.data] for d in range(layout.data)]), loss)
        assert role.engine.step(LR).applied
        role.data.clear([ref.sample_id for ref in refs])


def everything(role: Role) -> State:
    """Every number of the training state, as the optimizer holds it."""
    assert role.engine.module is not None
    found: State = {f"model/{name}": p.detach().clone() for name, p in role.engine.module.named_parameters()}
    for part in role.engine.optimizer.chained_optimizers:
        for g, group in enumerate(part.optimizer.param_groups):
            for i, key in enumerate(group["params"]):
                found[f"master/{g}/{i}"] = key.detach().clone()
                found[f"steps/{g}"] = group.get("step")
                for name, value in part.optimizer.state[key].items():
                    found[f"{name}/{g}/{i}"] = value.clone()
    found["rng"] = torch.get_rng_state()
    found["role"] = role.state_dict()
    return found


def same(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        equal = torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        assert equal, name


def save(role: Role, directory: Path, step: int) -> None:
    writer = CheckpointWriter(role)
    writer.begin(directory, step)
    writer.finish()


def complete(directory: Path, layout: ParallelLayout, step: int, role: str = "actor") -> Path:
    """Complete a checkpoint as the master does when all ranks have written."""
    state = CheckpointState(
        step, step, 1, 4, DataPosition(0, [], 10, 1), {role: RoleState({}, "adam", str(layout))}, {}, "", 0.0
    )
    return commit(directory, state, [rank_stem(role, rank, layout.world_size) for rank in range(layout.world_size)])


def checkpoint(setup: Setup, model: Path, root: Path) -> tuple[Path, list[tuple[State, dict[str, torch.Tensor]]]]:
    """A checkpoint after BEFORE steps; and each rank's state and exported weights after AFTER more."""
    tmp = root / "step-00000003.tmp"
    tmp.mkdir(parents=True)

    def body(role: Role) -> tuple[State, dict[str, torch.Tensor]]:
        train(role, range(BEFORE))
        torch.rand(role.groups.rank + 1)  # random states that are not those of the start
        role.skipped_steps = 7
        save(role, tmp, BEFORE)
        train(role, range(BEFORE, BEFORE + AFTER))
        return everything(role), {name: tensor.clone() for name, tensor in role.engine.export()}

    found = setup.run(body, model)
    return complete(tmp, setup.layout, BEFORE), found


def resumed(role: Role, directory: Path) -> tuple[State, dict[str, torch.Tensor]]:
    load_checkpoint(role, directory)
    train(role, range(BEFORE, BEFORE + AFTER))
    return everything(role), {name: tensor.clone() for name, tensor in role.engine.export()}
