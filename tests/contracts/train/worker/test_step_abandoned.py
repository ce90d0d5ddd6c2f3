"""A call that is abandoned between two micro-batches leaves no rank in a collective and changes no state."""

import numpy as np
import pytest
import torch

from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.model_calls import MfcRequest
from realsys.train.step_gate import SettleRequest, StepAbandoned, StepGate
from realsys.train.worker.call_handlers import find_handler
from tests.support.serving.hf_models import make_model
from tests.support.training.ppo_batch import make_batch
from tests.support.training.train_ranks import build_role, coordinates, run_ranks

LAYOUTS = [ParallelLayout(data=2), ParallelLayout(tensor=2), ParallelLayout(pipeline=2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=2, seed=1).save_pretrained(directory)
    return directory


def train(role, handler, request):
    role.engine.gate.begin(request.version, request.mfc)
    return find_handler(handler).run(role, request).stats


def state_of(role):
    parameters = [tensor.clone() for _, tensor in role.engine.export()]
    momenta = [x.clone() for part in role.engine.optimizer.chained_optimizers for s in part.optimizer.state.values()
               for x in s.values() if isinstance(x, torch.Tensor)]  # fmt: skip
    return [*parameters, *momenta]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_abandoned_step_changes_nothing(model, layout, limit):
    refs, arrays = make_batch()
    config = Config.model_validate({"train": {"microbatch_tokens": 40, "min_microbatches": 3}})

    def body(rank, device):
        role = build_role(config, layout, rank, device, model)
        for name, values in arrays.items():
            logprobs = np.full(int(values["loss_mask"].sum()), -3.0, np.float32)
            role.data.put(name, {**values, "behav_logprobs": logprobs, "prox_logprobs": logprobs})
        parts = [refs[rank_ :: layout.data] for rank_ in range(layout.data)]
        request = MfcRequest("actor_train", "actor", "actor_train", 1, 0, [parts], args={"lr": 1e-3})
        assert len(role.microbatches(parts)) >= 3
        train(role, "actor_train", request)
        before = state_of(role)
        gate = role.engine.gate = StepGate()
        gate.settle(SettleRequest(abandon=True, limits={"actor_train": limit}))
        with pytest.raises(StepAbandoned):
            train(role, "actor_train", request)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, state_of(role), strict=True))
        role.engine.gate = StepGate()
        return unchanged, train(role, "actor_train", request)["grad_norm"], coordinates(layout, rank)

    results = run_ranks(2, body, config, layout)
    assert all(unchanged for unchanged, _, _ in results)
    assert all(norm > 0 for _, norm, _ in results)
