"""Log-probs of the trainer and of the embedded engine in bf16, for the same weights."""

import torch

from realsys.config.allocation import ACTOR, ParallelLayout
from realsys.config.dataflow import role_settings
from realsys.config.schema import Config
from realsys.generation.embedded.core import CoreSizes, EngineCore
from realsys.generation.embedded.decoder import fuse, read_tensors
from realsys.model_files.config_json import read_model
from realsys.train.megatron.train_engine import MegatronEngine
from realsys.train.worker.packing import MicroBatch
from tests.support.serving.generation_models import make_request
from tests.support.serving.generation_models import run as generate
from tests.support.serving.hf_models import make_model
from tests.support.training.train_ranks import FORMED, run_ranks

PROMPT, NEW = [3, 1, 4, 1, 5], 250


def differences(path, served, trained):
    """Trainer's minus engine's log-prob of each sampled token; ``model.head_dtype`` of the engine, of the trainer."""
    head = torch.float32 if served == "float32" else None
    weights = fuse(
        read_model(path), read_tensors(path), dtype=torch.bfloat16, device=torch.device("cpu"), head_dtype=head
    )
    core = EngineCore(read_model(path), weights, CoreSizes(8, 64, 512), None)
    ((completion,),) = generate(core, make_request("r", PROMPT, max_new_tokens=NEW, temperature=1.0))
    tokens = torch.tensor([*PROMPT, *completion.tokens])
    answer = torch.arange(len(PROMPT), len(tokens))
    batch = MicroBatch([], [len(tokens)], answer - 1, tokens, tokens[answer])
    config = Config.model_validate({"model": {"dtype": "bfloat16", "head_dtype": trained}})

    def score(rank, device):
        engine = MegatronEngine(config, role_settings(config, ACTOR), FORMED[ACTOR], device, trainable=False)
        engine.load(path)
        return engine.logprobs([batch])[0]

    (found,) = run_ranks(1, score, config, ParallelLayout())
    assert len(found) == NEW
    return (found - torch.tensor(completion.logprobs)).abs()


def test_fp32_head_is_one_setting_of_both_sides(tmp_path):
    """The layers add nothing here, so that the states are equal and only the head differs."""
    model = make_model(vocab_size=512, hidden_size=128, max_position_embeddings=512, initializer_range=0.3)
    with torch.no_grad():
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.bfloat16().save_pretrained(tmp_path)
    assert differences(tmp_path, "float32", "float32").max() < 1e-4
    assert differences(tmp_path, "model", "float32").max() > 0.01
    assert differences(tmp_path, "float32", "model").max() > 0.01
