"""Assumptions about costs that one run does not tell, with wide errors."""

from __future__ import annotations

from realsys.planner.parameters import Cost

#: share of a token's and of a step's time that does not grow with the batch; cores of the other processes per server;
#: exponent of the trainer's speed over the number of its data ranks
PRIORS = {
    "fixed_token": Cost(0.4, 0.25),  # reading the weights, on a GPU
    "fixed_token_on_cpu": Cost(0.1, 0.1),  # arithmetic takes longer than reading (benchmarks/generation.py)
    "fixed_step": Cost(0.15, 0.15),
    "others": Cost(0.3, 0.2),
    # A run has one number of ranks. On verl's page (published/) update_actor of the same batch takes 269.80, 133.41 and
    # 113.81 s on 32, 64 and 128 GPUs. So the exponent was 1.02, then 0.23: their mean and standard deviation.
    "scaling": Cost(0.62, 0.39),
}
