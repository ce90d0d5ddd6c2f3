"""A trainer and servers of the training service in numpy: a bigram model with Adam, so that equal bits mean something.

log p(t[i+1] | t[i]) is log_softmax(W[t[i]]); W is float64 [VOCAB, VOCAB].
"""

import asyncio
import io
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from realsys.serve.contract import Adam, CallRefused, Passed, Sampled, Snapshot

VOCAB = 11
MOST_NORM = 1e6  # a larger norm counts as not finite


class Killed(Exception):
    """Stands for the death of the process."""


@dataclass
class Model:
    weight: np.ndarray
    grad: np.ndarray = field(default_factory=lambda: np.zeros((VOCAB, VOCAB)))
    first: np.ndarray = field(default_factory=lambda: np.zeros((VOCAB, VOCAB)))
    second: np.ndarray = field(default_factory=lambda: np.zeros((VOCAB, VOCAB)))
    steps: int = 0

    def bits(self) -> bytes:
        """All that the next calls depend on."""
        return b"".join(a.tobytes() for a in (self.weight, self.grad, self.first, self.second)) + bytes([self.steps])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class NumpyTrainer:
    """``calls``: (tenant, method) in order. ``kill_at``: number of the call that kills the process when it is done."""

    def __init__(self, folder: Path, kill_at: int = -1) -> None:
        self.folder = folder
        self.models: dict[str, Model] = {}
        self.calls: list[tuple[str, str]] = []
        self.kept: list[Snapshot] = []
        self.kill_at = kill_at
        self.poison: set[int] = set()  # numbers of tokens of a row that kills the process
        self._busy = False
        self._versions = 0

    async def _one(self, tenant: str, method: str) -> None:
        assert not self._busy, "one call at a time"
        self._busy = True
        await asyncio.sleep(0)
        self._busy = False
        self.calls.append((tenant, method))
        if len(self.calls) - 1 == self.kill_at:
            raise Killed(method)

    async def start(self, tenant, seed, checkpoint=None):
        if checkpoint is None:
            self.models[tenant] = Model(np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)))
        else:
            self.models[tenant] = self._read(checkpoint)
        await self._one(tenant, "start")

    async def forward_backward(self, tenant, rows, loss, config, *, backward):
        model = self.models[tenant]
        if any(len(row.tokens) in self.poison for row in rows):
            raise Killed("poison")
        if loss not in ("cross_entropy", "importance_sampling"):
            raise CallRefused(f"{loss} is not computed here")
        logprobs, total = [], 0.0
        for row in rows:
            (positions,) = np.nonzero(row.loss_mask)
            before, tokens = row.tokens[positions - 1], row.tokens[positions]
            table = log_softmax(model.weight[before])
            chosen = table[np.arange(len(tokens)), tokens]
            weight = row.advantages.astype(np.float64)
            if loss == "importance_sampling":
                weight = weight * np.exp(chosen - row.logprobs)
            total -= float((weight * (chosen if loss == "cross_entropy" else 1.0)).sum())
            if backward:
                delta = np.exp(table)
                delta[np.arange(len(tokens)), tokens] -= 1.0
                np.add.at(model.grad, before, delta * weight[:, None])
            logprobs.append(chosen.astype(np.float32))
        await self._one(tenant, "forward_backward" if backward else "forward")
        return Passed(logprobs, {"loss:sum": total})

    async def step(self, tenant, adam: Adam):
        model = self.models[tenant]
        if float(np.sqrt((model.grad**2).sum())) > MOST_NORM:
            model.grad = np.zeros((VOCAB, VOCAB))
            await self._one(tenant, "step")
            raise CallRefused("the gradient is not finite")
        model.steps += 1
        model.first = adam.beta1 * model.first + (1 - adam.beta1) * model.grad
        model.second = adam.beta2 * model.second + (1 - adam.beta2) * model.grad**2
        first, second = model.first / (1 - adam.beta1**model.steps), model.second / (1 - adam.beta2**model.steps)
        model.weight = model.weight - adam.learning_rate * first / (np.sqrt(second) + adam.eps)
        norm = float(np.sqrt((model.grad**2).sum()))
        model.grad = np.zeros((VOCAB, VOCAB))
        await self._one(tenant, "step")
        return {"grad_norm:mean": norm}

    async def save(self, tenant, folder):
        assert not folder.exists()
        model, temporary = self.models[tenant], folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        content = io.BytesIO()
        np.savez(content, weight=model.weight, first=model.first, second=model.second, steps=np.array(model.steps))
        (temporary / "state.npz").write_bytes(content.getvalue())
        os.rename(temporary, folder)
        await self._one(tenant, "save")

    async def load(self, tenant, folder, *, optimizer):
        read = self._read(folder)
        self.models[tenant] = read if optimizer else Model(read.weight)
        await self._one(tenant, "load")

    async def snapshot(self, tenant):
        self._versions = max([0, *(int(path.stem) for path in self.folder.glob("*.npy"))]) + 1
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{self._versions}.npy"
        np.save(path, self.models[tenant].weight)
        await self._one(tenant, "snapshot")
        return Snapshot(f"{tenant}/{self._versions}", self._versions, str(path))

    async def keep(self, snapshots):
        self.kept = list(snapshots)
        for path in self.folder.glob("*.npy"):
            if str(path) not in {each.locator for each in snapshots}:
                path.unlink()

    async def drop(self, tenant):
        del self.models[tenant]
        await self._one(tenant, "drop")

    @staticmethod
    def _read(folder: Path) -> Model:
        with np.load(folder / "state.npz") as read:
            return Model(read["weight"], first=read["first"], second=read["second"], steps=int(read["steps"]))


class NumpySampler:
    """Samples greedily from a snapshot; the base model repeats the last token. Waits for ``gate``."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def sample(self, snapshot, prompt, sampling):
        await self.gate.wait()
        weight = np.eye(VOCAB) if snapshot is None else np.load(snapshot.locator)
        tokens, logprobs, last = [], [], prompt[-1]
        while len(tokens) < sampling.max_tokens:
            table = log_softmax(weight[last])
            last = int(table.argmax())
            tokens.append(last)
            logprobs.append(float(table[last]))
        top = [[(token, logprob)] for token, logprob in zip(tokens, logprobs, strict=True)]
        return [Sampled(tokens, logprobs, stopped=False, top=top if sampling.top_logprobs else None)] * sampling.n
