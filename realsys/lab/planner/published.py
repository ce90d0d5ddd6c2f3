"""Reads the published tables, and predicts the asynchronous figures from the synchronous ones.

    table ──parts──> Work: seconds of generation and training on all devices ──phases──> predicted, published

The tables name neither the lengths of completions nor the speed of a server. So a small trial is simulated with as many
servers as there are shares of devices, and its time is scaled to the published seconds. The assumptions:

- training takes the time of all devices, times devices over devices that train
- generation has a server per share; half of a token's time grows with the completions of a server
- lengths are lognormal, with the published mean, or a sixth of the limit
- weights, communication and idle engines cost nothing
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from realsys.config.fields import replaced
from realsys.config.schema import Config
from realsys.lab.planner.steady_state import endless, run_quietly
from realsys.lab.simulation.scenarios import LengthSettings, Plan, ServerSettings, SimSettings, TrainerSettings
from realsys.lab.simulation.simulation import Simulation

TABLES = ("verl_fully_async", "nemo_rl_0_6", "areal")
SHARES = 8  # parts into which the devices are divided: one server of the small trial each
_GROUPS, _SIZE, _STEPS = 32, 4, 8  # groups of a batch, completions of a group, simulated steps
_TOKEN_S, _LIMIT = 0.05, 2000  # seconds of a token at mean load; longest completion in tokens
_MEAN, _SIGMA = 1 / 6, 0.9  # mean length over the limit if none is published; spread of the logarithm
_NARROW = 0.5  # spread where the mean is near the limit
_GROWS = 0.5  # share of a token's time that grows with the completions of a server
_BANDWIDTH = 0.5  # share of the memory bandwidth that decoding reaches


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Seconds of a batch if all devices generate it, and if all devices train it. ``mean``: length over the limit."""

    generation: float
    training: float
    mean: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speed of asynchronous training over that of synchronous training, published and predicted."""

    table: str
    name: str
    parts: str  # where the parts of the synchronous step are from
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1.0

    @property
    def sign_is_right(self) -> bool:
        """Return True if both say that asynchronous training is faster, or both that it is slower."""
        return (self.published > 1.0) == (self.predicted > 1.0)


def table(name: str) -> dict[str, Any]:
    """Return a table with its source."""
    text = resources.files(__package__).joinpath("tables", f"{name}.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def comparisons() -> list[Comparison]:
    """Return all comparisons of the tables."""
    return [*_verl(), *_nemo(), *_areal()]


def _verl() -> Iterator[Comparison]:
    for row in table("verl_fully_async")["rows"]:
        training = row["sync"] - row["generation"] - row["old_log_prob"]  # the asynchronous mode skips old_log_prob
        work = BatchWork(row["generation"], training, _MEAN)
        step = asynchronous(work, row["split"], eta=1)
        yield Comparison("verl", row["name"], "published", row["sync"] / row["async"], row["sync"] / step)


def _nemo() -> Iterator[Comparison]:
    for row in table("nemo_rl_0_6")["rows"]:
        mean = row["mean"] / row["limit"]
        if "half" in row:
            # What half of the devices would take longer is work that scales; the rest does not, as decoding few long
            # completions does not.
            half = row["half"]["sync"]
            scales = max(0.0, 2 * (half - row["sync"]))
            # ``Work`` counts all devices, and each side has half of them: the half row has their times.
            step = max(half - scales, scales)
            parts = "two synchronous rows"
        else:
            generation = _decoding(row, row["devices"], mean)
            side = _decoding(row, row["split"][0], mean)
            step = max(side, (row["sync"] - generation) * row["devices"] / row["split"][1])
            parts = "memory bandwidth"
        yield Comparison("NeMo-RL", row["name"], parts, row["sync"] / row["async"], row["sync"] / step)


def _decoding(row: Mapping[str, Any], devices: int, mean: float) -> float:
    """Return the seconds to decode up to the limit: each token reads the weights, and the keys of half the tokens."""
    running = row["completions"] * row["tensor"] / devices
    gigabytes = row["weight_gigabytes"] + running * row["limit"] * mean / 2 * row["bytes_per_token"] / 1e9
    return float(row["limit"] * gigabytes / (1e3 * row["terabytes_per_s"] * _BANDWIDTH * row["tensor"]))


def _areal() -> Iterator[Comparison]:
    found = table("areal")
    split = found["split"]
    balanced = _balanced(split, eta=8)
    for row in found["hours"]:
        yield Comparison("AReaL", f"{row['name']}, hours", "balanced split", row["sync"] / row["async"], balanced)
    speeds = found["staleness"]["tokens_per_s"]
    for eta, speed in speeds.items():
        if eta != "0":
            published = speed / speeds["0"]
            predicted = _balanced(split, eta=int(eta), same_split=True)
            yield Comparison("AReaL", f"eta {eta} over eta 0", "balanced split", published, predicted)


def asynchronous(work: BatchWork, split: Sequence[int], eta: int) -> float:
    """Return the seconds of an asynchronous step on a split: devices that generate, devices that train."""
    generating, training = split
    devices = generating + training
    scale = work.generation / _unit(SHARES, 0.0, 0, work.mean)
    seconds = work.training * devices / training / scale
    return scale * _unit(_servers(split), seconds, eta, work.mean)


def _balanced(split: Sequence[int], eta: int, *, same_split: bool = False) -> float:
    """Return the speed over synchronous training if training takes as long as generation at its best.

    Synchronous training uses all devices for both in turn; with ``same_split`` it is eta 0 on the split.
    """
    servers = _servers(split)
    training = _unit(servers, 0.0, 8, _MEAN)
    together = _unit(servers, training, eta, _MEAN)
    if same_split:
        return _unit(servers, training, 0, _MEAN) / together
    return (_unit(SHARES, 0.0, 0, _MEAN) + training * split[1] / sum(split)) / together


def _servers(split: Sequence[int]) -> int:
    return max(1, round(SHARES * split[0] / sum(split)))


@functools.cache
def _unit(servers: int, training: float, eta: int, mean: float) -> float:
    """Return the seconds of a step of the small trial, in which as many groups are sampled as a batch has."""
    completions = _GROUPS * _SIZE / SHARES
    config = endless(_config(eta, servers), 1)
    sigma = _SIGMA if mean < 0.5 else _NARROW
    settings = SimSettings(
        steps=eta + 2 + _STEPS,
        prompt_tokens=1,
        judge_s=0.0,
        call_s=0.0,
        stalled_h=1e6,
        lengths=LengthSettings(kind="lognormal", mean=mean * _LIMIT, sigma=sigma, longest=_LIMIT, prompt_share=0.5),
        server=ServerSettings(
            tokens_per_s=1.0 / (_TOKEN_S * (1.0 - _GROWS)),
            s_per_completion=_TOKEN_S * _GROWS / completions,
            total_tokens_per_s=1e9,
            prefill_tokens_per_s=1e9,
            stage_s=0.0,
            swap_s=0.0,
        ),
        trainer=TrainerSettings(step_s=training, publish_s=0.0),
    )
    simulation = Simulation(Plan("published", config, settings))
    run_quietly(simulation)
    steps = simulation.account.steps[eta + 1 :]
    return (steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1)


def _config(eta: int, servers: int) -> Config:
    workers = 4
    changes = {
        "allocation": f"serve.d{servers}+d1",
        "train.batch_groups": _GROUPS,
        "rollout.group_size": _SIZE,
        "rollout.workers": workers,
        "rollout.max_concurrent": _GROUPS // workers,
        "asynchronous.max_staleness": eta,
    }
    config = Config()
    for path, value in changes.items():
        config = replaced(config, path.split("."), value)
    return config
