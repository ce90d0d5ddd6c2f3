"""Tiny models of all roles and one batch, for tests of the interfaces on real ranks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from transformers import PreTrainedModel

from realsys.cluster.topology import Mesh, whole_mesh
from realsys.config.allocation import parse_allocation
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.train.megatron.device import Device
from realsys.train.megatron.mesh import form_meshes
from realsys.train.worker.call_handlers import CallOutcome, Role, find_handler
from realsys.train.worker.call_service import make_role
from realsys.train.worker.data_manager import DataManager
from realsys.types import SequenceRef
from tests.support.serving.hf_models import VOCAB, make_model

Arrays = dict[str, npt.NDArray[Any]]


def whole(text: str, *roles: str) -> dict[str, Mesh]:
    """All roles on one mesh of all workers, as ``d2p2``."""
    return dict.fromkeys(roles, whole_mesh(parse_allocation(f"sglang.d1+{text}").actor))


def make_models() -> dict[str, PreTrainedModel]:
    """A model of two layers per role; no two alike, and no value head at zero."""
    heads = {"actor": False, "ref": False, "critic": True, "reward": True}
    return {
        role: make_model(value=value, seed=seed, num_hidden_layers=2)
        for seed, (role, value) in enumerate(heads.items())
    }


def save_models(models: Mapping[str, PreTrainedModel], folder: Path) -> dict[str, Path]:
    for role, model in models.items():
        model.save_pretrained(folder / role)
    return {role: folder / role for role in models}


#: group, episode, whether this row was cut off, runs of context and sampled tokens in turn
ROWS = [
    (0, 0, False, [3, 14]),
    (0, 1, False, [5, 3]),
    (0, 2, False, [2, 1]),
    (1, 3, False, [4, 4, 3, 5]),  # two turns
    (1, 4, True, [6, 21]),  # an episode of two rows
    (1, 4, False, [2, 6]),
    (2, 5, False, [1, 5]),  # and another: the second row has three turns, and ends with feedback
    (2, 5, False, [3, 2, 2, 6, 1, 4, 2]),
    (2, 6, True, [7, 8]),
]


def make_batch() -> tuple[list[SequenceRef], dict[str, Arrays]]:
    """Nine rows of seven episodes at three prompts; one of a single token, two episodes cut off; rewards of turns."""
    rng = np.random.default_rng(18)
    refs, arrays = [], {}
    outcomes = rng.choice([5.0, -5.0, 2.0], 1 + ROWS[-1][1])
    sizes = [(episode, sum(runs[1::2])) for _, episode, _, runs in ROWS]
    for i, (group, episode, row_truncated, runs) in enumerate(ROWS):
        name, length, loss_tokens = f"t{i // 3}/{i % 3}", sum(runs), sum(runs[1::2])
        whole = sum(size for other, size in sizes if other == episode)
        truncated = any(cut for _, other, cut, _ in ROWS if other == episode)
        last = i + 1 == len(ROWS) or ROWS[i + 1][1] != episode
        reward = float(outcomes[episode])
        refs.append(
            SequenceRef(name, length, loss_tokens, reward, truncated, group, episode, whole, last, row_truncated)
        )
        turns = np.zeros(loss_tokens, np.float32)
        turns[np.cumsum(runs[1::2]) - 1] = rng.choice([0.0, 0.5, -1.0], len(runs[1::2]))
        arrays[name] = {
            "tokens": rng.integers(0, VOCAB, length).astype(np.int32),
            "loss_mask": np.repeat(np.arange(len(runs)) % 2 == 1, runs),
            "behav_logprobs": rng.uniform(-4, -3, loss_tokens).astype(np.float32),
            "token_rewards": turns,
        }
    return refs, arrays


def deal(refs: Sequence[SequenceRef], data_ranks: int) -> list[list[SequenceRef]]:
    """Unevenly: data rank 0 gets two of three."""
    parts: list[list[SequenceRef]] = [[] for _ in range(data_ranks)]
    for i, ref in enumerate(refs):
        parts[0 if i % 3 else i % data_ranks].append(ref)
    return parts


class Worker:
    """A ModelWorker of these tests: its roles, its data, and calls split like the master splits them."""

    def __init__(
        self, rank: int, device: Device, config: Config, meshes: Mapping[str, Mesh], models: Mapping[str, Path]
    ) -> None:
        self.data = DataManager(rank, config.train.ppo.top_k)
        self.roles: dict[str, Role] = {}
        self._meshes = meshes
        groups = form_meshes(meshes, rank, config.cluster, device)
        for name in meshes:
            if name not in groups:
                continue
            trainable = name in ("actor", "critic")
            self.roles[name] = make_role(
                config, name, models[name], groups[name], self.data, device, trainable=trainable
            )

    def fill(self, arrays: Mapping[str, Arrays]) -> None:
        for sample_id, own in arrays.items():
            self.data.put(sample_id, own)

    def call(
        self,
        handler: str,
        role: str,
        minibatches: Sequence[Sequence[SequenceRef]],
        deal: Callable[[Sequence[SequenceRef], int], list[list[SequenceRef]]] = deal,
        version: int = 0,
        **args: Any,
    ) -> CallOutcome:
        """One call on the mesh of ``role``; nothing on workers outside of it."""
        if role not in self.roles:
            return CallOutcome()
        dealt = [deal(refs, self._meshes[role].layout.data) for refs in minibatches]
        request = MfcRequest(handler, role, handler, 0, version, dealt, args)
        return find_handler(handler).run(self.roles[role], request)

    def spread(self, refs: Sequence[SequenceRef], *keys: str) -> dict[str, Arrays]:
        """Every worker gets these arrays of all samples, as if all had been transferred."""
        own = {
            ref.sample_id: {key: self.data.get(ref.sample_id, key) for key in keys if self.data.has(ref.sample_id, key)}
            for ref in refs
        }
        found: list[dict[str, Arrays]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, own)
        merged: dict[str, Arrays] = {}
        for part in found:
            for sample_id, arrays in part.items():
                merged.setdefault(sample_id, {}).update(arrays)
        self.fill(merged)
        return merged
