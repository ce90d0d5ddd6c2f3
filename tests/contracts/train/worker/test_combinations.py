"""Two whole train steps that learn, with features combined and roles spread, end with the weights of one plain process.

Each feature has a separate test against plain torch; here they meet: offloading between calls, pipelines, sequence
parallelism, chunks of logits, recomputation, adapters, the distributed optimizer, and several minibatches per step.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realsys.cluster.topology import place
from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.train.worker.call_handlers import onloaded
from tests.support.training.ppo_batch import Worker, make_batch
from tests.support.training.train_ranks import cat_exports, run_ranks

REFS, ARRAYS = make_batch()
MINIBATCHES = [REFS[:4], REFS[4:]]
TRAINED = ("actor", "critic")
SGD = {"name": "sgd", "beta1": 0.9, "weight_decay": 0.01, "clip_grad": 0.5}
# eps of the size of gradients: with a small one Adam turns gradients near zero into steps of either sign
ADAM = {"eps": 0.1, "weight_decay": 0.01, "clip_grad": 0.5}
CRITIC = {"gamma": 0.97, "lam": 0.9, "critic": {"enabled": True, "value_norm": "exponential"}}
KL = {"coef": 0.3, "place": "reward", "estimator": "k1"}

Weights = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """``ppo`` and ``train`` hold for both; ``spread`` are the settings that must not matter."""

    allocation: str
    ppo: dict[str, Any]
    train: dict[str, Any]
    spread: dict[str, Any]
    offload: str = "none"
    dtype: str = "float32"

    def config(self, *, plain):
        offload = "none" if plain else self.offload
        train = {"microbatch_tokens": 48, "optimizer": SGD, "ppo": self.ppo, **self.train, "offload": offload}
        roles = {"ref": {"offload": offload}, "critic": {"offload": offload, "optimizer": train["optimizer"]}}
        return Config.model_validate(
            {
                "model": {"dtype": self.dtype},
                "generation": {"sampling": {"temperature": 0.7, "max_new_tokens": 24}},
                "roles": roles,
                "train": train | ({} if plain else self.spread),
            }
        )


CASES = {
    "pipelines, everything offloaded": Case("actor.p2,ref.d2+critic.p2", CRITIC | {"kl": KL}, {}, {}, "all"),
    "all that saves memory": Case(
        "actor.d2m2,critic.p2m2,ref.m2",
        CRITIC | {"kl": KL, "entropy_coef": 0.05, "use_decoupled_loss": False},
        {"optimizer": ADAM},
        {
            "sequence_parallel": True,
            "head_chunk_tokens": 5,
            "recompute": True,
            "distributed_optimizer": True,
            "min_microbatches": 2,
        },
        "optimizer",
    ),
    "adapters beside a critic": Case(
        "actor.m2,critic.d2", CRITIC, {"lora": {"rank": 4}}, {"sequence_parallel": True}, "all"
    ),
    "masked answers and empty ranks": Case(
        "actor.d4",
        {
            "aggregation": "sequence",
            "truncated_answers": "mask",
            "skip_zero_advantage": True,
            "advantage": {"mean": "group", "std": "group"},
        },
        {},
        {"distributed_optimizer": False},
    ),
    "bfloat16": Case(
        "actor.d2p2,critic.d2", CRITIC, {"optimizer": ADAM}, {"distributed_optimizer": True}, "all", "bfloat16"
    ),
}


def train(rank, device, config, meshes, folders):
    """Two steps on the same batch; what this rank exports then."""
    worker = Worker(rank, device, config, meshes, folders)
    worker.fill(ARRAYS)
    kl = {"kl_coef": 0.3}
    calls: list[tuple[str, str, tuple[str, ...], dict[str, float]]] = [
        ("actor_inf", "actor", ("prox_logprobs",), {}),
        ("ref_inf", "ref", ("ref_logprobs",), {}),
        ("critic_inf", "critic", ("values",), {}),
        ("advantages", "actor", ("advantages", "returns"), kl),
        ("actor_train", "actor", (), {"lr": 0.05} | kl),
        ("critic_train", "critic", (), {"lr": 0.05}),
    ]
    made = [key for _, _, keys, _ in calls for key in keys]
    for _ in range(2):
        worker.data.clear([ref.sample_id for ref in REFS], made)  # as the master does
        for interface, name, keys, args in calls:
            if name not in meshes or (interface == "advantages" and "critic" not in meshes):
                continue
            if name in worker.roles:
                with onloaded(worker.roles[name]):
                    worker.call(interface, name, MINIBATCHES, **args)
            worker.spread(REFS, *keys)
    found: Weights = {}
    for name in (name for name in TRAINED if name in worker.roles):
        with onloaded(worker.roles[name]):
            found[name] = {key: tensor.float().clone() for key, tensor in worker.roles[name].engine.export()}
    return found


def run(config, allocation, folders):
    placed, ppo = parse_allocation(f"sglang.d1+{allocation}"), config.train.ppo
    roles = ["actor", *["ref"] * (ppo.kl.coef > 0), *["critic"] * ppo.critic.enabled]
    meshes = place(placed, roles)
    parts = run_ranks(placed.workers, lambda rank, device: train(rank, device, config, meshes, folders), config)
    return {name: cat_exports([part.get(name, {}) for part in parts]) for name in TRAINED if name in roles}


@pytest.mark.parametrize("name", CASES)
def test_combined_features_learn_what_a_plain_process_learns(name, folders):
    case = CASES[name]
    expected = run(case.config(plain=True), "actor.d1", folders)
    found = run(case.config(plain=False), case.allocation, folders)
    assert found.keys() == expected.keys()
    for role, weights in expected.items():
        before = load_file(folders[role] / "model.safetensors")
        assert found[role].keys() == weights.keys() == before.keys()
        way = torch.cat([(weights[key] - before[key]).flatten() for key in before])
        apart = torch.cat([(weights[key] - found[role][key]).flatten() for key in before])
        assert way.norm() > 0.05, "else nothing was learned"
        assert apart.norm() / way.norm() < (0.1 if case.dtype == "bfloat16" else 1e-4), role
