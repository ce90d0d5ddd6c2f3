"""The embedded engine on a GPU: tokens and log-probs against transformers and the trainer, and a weight swap."""

import numpy as np
import pytest
import torch

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import fuse, read_tensors
from realsys.model_files.config_json import read_model
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.worker.packing import MicroBatch
from tests.support.serving.generation_models import (
    CPU,
    PROMPTS,
    check_logprobs,
    make_model,
    make_request,
    old_and_new,
    run,
)
from tests.support.training.train_ranks import FORMED, run_ranks

pytestmark = pytest.mark.gpu
NEW = 60


def weights_on(path, device, dtype):
    return fuse(read_model(path), read_tensors(path), dtype=dtype, device=device)


def core_on(path, device, dtype=torch.float32):
    return EngineCore(read_model(path), weights_on(path, device.device, dtype), CoreSizes(8, 64, 128), None)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama3"])
def test_sampled_logprobs_are_those_of_transformers(kind, tmp_path, compute_on):
    model = make_model(kind, tmp_path)
    compute_on("gpu")

    def body(rank, device):
        requests = [make_request(str(i), p, seed=i, max_new_tokens=NEW) for i, p in enumerate(PROMPTS)]
        return [completion for (completion,) in run(core_on(tmp_path, device), *requests)]

    (found,) = run_ranks(1, body, Config(), joined=False)
    for prompt, completion in zip(PROMPTS, found, strict=True):
        check_logprobs(model, prompt, completion, tolerance=1e-3)


def test_logprobs_agree_with_the_trainer_in_bf16(tmp_path, compute_on):
    make_model("qwen2", tmp_path)
    compute_on("gpu")
    config = Config.model_validate({"model": {"dtype": "bfloat16"}})
    prompt = PROMPTS[3]

    def body(rank, device):
        core = core_on(tmp_path, device, torch.bfloat16)
        ((completion,),) = run(core, make_request("r", prompt, max_new_tokens=NEW))
        tokens = torch.tensor([*prompt, *completion.tokens], device=device.device)
        rows = torch.arange(len(prompt) - 1, len(tokens) - 1, device=device.device)
        batch = MicroBatch([], [len(tokens)], rows, tokens, tokens[rows + 1])
        engine = MegatronEngine(config, role_settings(config, ACTOR), FORMED[ACTOR], device, trainable=False)
        engine.load(tmp_path)
        (scored,) = engine.logprobs([batch])
        return float(np.abs(scored.cpu().numpy() - completion.logprobs).mean())

    (difference,) = run_ranks(1, body, config, ParallelLayout())
    assert difference < 0.05


def test_weights_are_swapped_within_a_completion(tmp_path, compute_on):
    """Copied into the old tensors on the device: the tokens after the swap are those of the new model."""
    (_, old_path), (new_model, new_path) = old_and_new(tmp_path)
    compute_on("gpu")

    def body(rank, device):
        core = core_on(old_path, device)
        request = make_request("r", PROMPTS[1], max_new_tokens=NEW)
        core.submit(request)
        for _ in range(NEW // 2):
            core.step()
        core.swap(weights_on(new_path, CPU, torch.float32), 1)  # staged on the host, as an update is
        ((fresh,),) = run(core, make_request("s", PROMPTS[3], max_new_tokens=NEW))
        return len(request.done.result(timeout=0)[0].tokens), fresh

    ((length, fresh),) = run_ranks(1, body, Config(), joined=False)
    assert length == NEW
    check_logprobs(new_model, PROMPTS[3], fresh, tolerance=1e-3)
