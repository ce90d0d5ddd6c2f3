"""Nothing grows from train step to train step: a short form of benchmarks/memory.py, on two real ranks."""

import json

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json

from realsys.config.schema import Config
from tests.support.training.memory_run import run
from tests.support.training.train_ranks import run_ranks

STEPS = 12
SETTLED = 2  # the first step allocates Adam's state


def grows(values):
    """Return True if all later values are above all earlier ones.

    One tensor more or less is no growth: torch drops the last reference to some in another thread.
    """
    half = len(values) // 2
    return min(values[half:]) > max(values[:half])


def test_rank_holds_no_more_after_many_steps():
    histories = run(STEPS, every=1)
    assert len(histories) == 2
    for history in histories:
        assert [held.step for held in history] == list(range(STEPS))
        assert [(held.samples, held.array_bytes) for held in history] == [(0, 0)] * STEPS, "cleared samples are held"
        late = history[SETTLED:]
        assert not grows([held.tensors for held in late]), "tensors outlive their step"
        assert not grows([held.tensor_bytes for held in late])
        # A step's activations are some MiB; kept from each step they would be far beyond what an allocator rounds up.
        assert late[-1].rss_bytes - late[0].rss_bytes < 16 << 20


def test_torch_records_no_collectives_on_cpu():
    """By default it fills for a thousand steps, and then some megabytes stay."""

    def body(rank, device):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
        return len(json.loads(_dump_fr_trace_json()).get("entries", []))

    assert run_ranks(2, body, Config()) == [0, 0]
