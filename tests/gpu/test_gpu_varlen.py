"""The attention kernel on a GPU against float64: every head count, width and length that training uses."""

import pytest
import torch

from realsys.cluster.gpu_devices import attention_kernel, choose_kernel
from realsys.config.schema import Config
from tests.gpu.conftest import STAND_IN
from tests.support.gpu.reference_attention import recorded, reference
from tests.support.training.train_ranks import run_ranks

pytestmark = pytest.mark.gpu
LENGTHS = ([1] if STAND_IN else [4096, 1, 700, 3], [1] * 5, [64, 9, 7, 7, 3, 1])
REPEATS = 5


def kernel():
    return choose_kernel(recorded("2.13", reference)) if STAND_IN else attention_kernel()


def relative_error(found, expected):
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-12))


def largest_error(lengths, heads, kv_heads, size, device):
    """Return the largest relative error of outputs and gradients. Fails if repetitions differ in the output."""
    torch.manual_seed(1)
    how = {"device": device.device, "dtype": torch.bfloat16}
    tensors = [torch.randn(sum(lengths), n, size, **how).requires_grad_() for n in (heads, kv_heads, kv_heads)]
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=device.device).cumsum(0, dtype=torch.int32)
    scale = size**-0.5
    outputs = [kernel()(*tensors, (ends, ends), (max(lengths), max(lengths)), scale) for _ in range(REPEATS)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    slope = torch.randn_like(outputs[0])
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = reference(*exact, ends, scale=scale, window_size=(-1, 0))
    errors = [relative_error(outputs[0], expected)]
    gradients = [torch.autograd.grad(o, x, slope.to(o)) for o, x in ((outputs[0], tensors), (expected, exact))]
    errors += [relative_error(ours, theirs) for ours, theirs in zip(*gradients, strict=True) if theirs.norm() > 1e-6]
    return max(errors)


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (7, 1)])
def test_kernel_agrees_with_float64(heads, kv_heads, size, compute_on):
    compute_on("gpu")

    def body(rank, device):
        return [largest_error(lengths, heads, kv_heads, size, device) for lengths in LENGTHS]

    (errors,) = run_ranks(1, body, Config(), joined=False)
    assert max(errors) < 1e-2, errors
