"""A client that trains a new model with the same steps in every process that runs it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker

from tests.support.jobs.jobs import BOUND_S

PROMPT = list(range(5, 15))


@dataclass(frozen=True)
class Config:
    """``log_path``: folder of the files ``calls``, a byte before each step, and ``saved``: the path of the state.

    With ``killed`` the next step begins when its file ``kills`` has a byte for each step so far.
    """

    base_url: str
    model_name: str
    log_path: str
    lora_rank: int
    steps: int
    killed: bool = False


def main(config: Config) -> None:
    client = tinker.ServiceClient(base_url=config.base_url)
    training = client.create_lora_training_client(config.model_name, rank=config.lora_rank, seed=11).result()
    rng, folder = random.Random(3), Path(config.log_path)
    folder.mkdir(exist_ok=True)
    for number in range(config.steps):
        data = [_datum(rng) for _ in range(6)]
        with (folder / "calls").open("ab") as file:
            file.write(b".")
        passed = training.forward_backward(data, "importance_sampling")
        stepped = training.optim_step(tinker.AdamParams(learning_rate=1e-2))
        assert passed.result(timeout=BOUND_S).metrics and stepped.result(timeout=BOUND_S)
        sampler = training.save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints(PROMPT)
        sampled = sampler.sample(prompt, 2, tinker.SamplingParams(max_tokens=4)).result(timeout=BOUND_S)
        assert all(sequence.tokens for sequence in sampled.sequences)
        training.save_state(f"step-{number}").result(timeout=BOUND_S)  # with it the restarts in a row begin anew
        while config.killed and (folder / "kills").stat().st_size <= number:
            time.sleep(0.05)
    (folder / "saved").write_text(training.save_state("end").result(timeout=BOUND_S).path)


def _datum(rng: random.Random) -> tinker.Datum:
    tokens = [rng.randrange(5, 60) for _ in range(rng.randrange(8, 40))]
    places = range(len(tokens) - 1)
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([-rng.random() for _ in places], np.float32),
        "advantages": np.array([rng.uniform(-1, 1) for _ in places], np.float32),
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()},
    )
