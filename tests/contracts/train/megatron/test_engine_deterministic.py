"""``train.deterministic``: no operation of a step is one that torch refuses on CUDA for its lack of a fixed order."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from realsys.config.schema_train import OptimizerConfig
from tests.support.serving.hf_models import make_model
from tests.support.training.engine_ranks import NLL, make_config, make_settings, on_ranks

#: from the page of torch.use_deterministic_algorithms: refused on CUDA, whatever their arguments
REFUSED = {"put_", "histc", "bincount", "kthvalue", "median", "nanmedian", "grid_sampler_2d", "_ctc_loss", "cumprod"}
#: refused for floating point numbers
REFUSED_FLOATS = {"cumsum"}


class Refused(TorchDispatchMode):
    """Names the operations that torch would refuse on CUDA."""

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.add(name)
        if name in REFUSED or (name in REFUSED_FLOATS and args[0].is_floating_point()):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "train", [{}, {"recompute": True, "head_chunk_tokens": 8, "distributed_optimizer": True}], ids=["plain", "saving"]
)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_step_runs_nothing_that_torch_would_refuse(head, train, tmp_path):
    make_model(value=head == "value").save_pretrained(tmp_path)

    def body(rank):
        engine = rank.engine
        engine.use_optimizer("train", OptimizerConfig(clip_grad=1e-6))
        with Refused() as mode:
            if head == "lm":
                engine.logprobs(rank.micro_batches())
                engine.accumulate(rank.micro_batches(), NLL)
            else:
                engine.scores(rank.micro_batches())
                engine.accumulate(rank.micro_batches(), lambda batch, out: (out.values.square().sum(), {}))
            assert engine.step(1e-3).applied
        return mode.found, mode.seen

    settings = make_settings("lm" if head == "lm" else "value")
    [(found, seen)] = on_ranks("d1", tmp_path, body, make_config("bfloat16", deterministic=True, **train), settings)
    assert not found
    # Its sum over equal tokens has no fixed order on CUDA; Megatron takes an indexed sum instead, which has one.
    assert "embedding_dense_backward" not in seen
