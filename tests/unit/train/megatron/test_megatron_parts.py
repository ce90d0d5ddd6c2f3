"""Layouts and files of a model, meshes of its ranks, and its optimizer."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from realsys.cluster.topology import Mesh, whole_mesh
from realsys.config.allocation import ParallelLayout
from realsys.config.schema import Config
from realsys.errors import ModelError
from realsys.model_files.config_json import read_model
from realsys.train.checkpoint.saver import HeldParameter
from realsys.train.megatron import train_engine as module
from realsys.train.megatron.device import Device
from realsys.train.megatron.heads import logit_gradient_kernel, sums_kernel
from realsys.train.megatron.hf_model import HFReader, ShardMap, assign_writers, check_layout
from realsys.train.megatron.layers import (
    Fused,
    pack_segments,
    pad_rows,
    rms_norm,
    rotate,
    rotation_kernel,
    select_rows,
    swiglu,
    swiglu_gradient_kernel,
    swiglu_kernel,
)
from realsys.train.megatron.mesh import form_meshes, splits

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
}


def write_config(directory, **changes):
    (directory / "config.json").write_text(json.dumps(QWEN2 | changes))
    return directory


def read(directory, **changes):
    return read_model(write_config(directory, **changes))


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, ParallelLayout(tensor=8), "num_attention_heads=4 must divide by m8 of the training layout d1p1m8"),
        ({}, ParallelLayout(pipeline=5), "num_hidden_layers=4 must be at least p5"),
        # the last rank would have no row of the vocabulary
        ({"num_key_value_heads": 4, "vocab_size": 9}, ParallelLayout(tensor=4), "vocab_size=9 .* the last of m4"),
    ],
)
def test_layout_that_does_not_fit_is_refused(tmp_path, changes, layout, message):
    check_layout(read(tmp_path, num_key_value_heads=4, vocab_size=50), ParallelLayout(tensor=4))
    with pytest.raises(ModelError, match=message):
        check_layout(read(tmp_path, **changes), layout)


def checkpoint(directory, **changes):
    model = read(directory)
    tensors: dict[str, torch.Tensor | None] = {
        name: torch.zeros(shape) for name, shape in model.tensor_shapes().items()
    }
    save_file({k: v for k, v in (tensors | changes).items() if v is not None}, directory / "model.safetensors")
    return model, directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "tensor model.norm.weight not found"),
        ({"model.norm.weight": torch.zeros(31)}, r"model.norm.weight has shape \(31,\), config.json requires \(32,\)"),
        ({"visual.weight": torch.zeros(1)}, "visual.weight is not part of the model"),
    ],
)
def test_checkpoint_of_other_model_is_refused(tmp_path, changes, message):
    model, directory = checkpoint(tmp_path, **changes)
    with pytest.raises(ModelError, match=message):
        HFReader(directory).check(model)


def test_missing_or_broken_safetensors_are_refused(tmp_path):
    with pytest.raises(ModelError, match="convert the model to safetensors"):
        HFReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        HFReader(tmp_path)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_splitting_a_shard_undoes_joining_it(tmp_path, tensor_ranks):
    model = read(tmp_path)
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        from realsys.train.megatron.hf_model import mapping_of

        mapping = mapping_of(f"decoder.layers.0.{name}", 0, tied=False)
        shapes = [model.tensor_shapes()[n] for n in mapping.hf]
        parts = [torch.randn(rows // tensor_ranks, columns) for rows, columns in shapes]
        shard_map = ShardMap(model, 0, tensor_ranks)
        joined = shard_map._join(mapping, parts)
        assert all(torch.equal(a, b) for a, b in zip(shard_map.split(mapping, joined), parts, strict=True))


def test_writers_share_the_bytes():
    sizes = [100, 7, 50, 50, 3, 40, 60]
    owners = assign_writers(sizes, 3)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == w) for w in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= 110
    assert set(assign_writers([1], 4)) == {0}


def test_fused_operations_have_gradients_of_plain_ones():
    torch.manual_seed(1)
    x, weight = torch.randn(7, 6), torch.randn(6)
    angle = torch.randn(7, 1, 3)

    def plain_rotation(t):
        first, second = t.reshape(7, 1, 6).chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    rows = torch.tensor([5, 0, 3])
    cases: list[tuple[Any, Any]] = [
        (lambda t, w: rms_norm(t, w, 1e-5), lambda t, w: F.rms_norm(t, (6,), w, 1e-5)),
        (lambda t, w: swiglu(t * w), lambda t, w: F.silu((t * w)[:, :3]) * (t * w)[:, 3:]),
        (lambda t, w: rotate((t * w).reshape(7, 1, 6), angle.cos(), angle.sin()), lambda t, w: plain_rotation(t * w)),
        (lambda t, w: select_rows(t * w, rows), lambda t, w: (t * w)[rows]),
        (lambda t, w: select_rows(t * w, rows[:0]), lambda t, w: (t * w)[rows[:0]]),
    ]
    for fused, plain in cases:
        grads = []
        outputs = []
        for function in (fused, plain):
            a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
            out = function(a, b)
            (out * torch.linspace(1, 2, out.numel()).reshape(out.shape)).sum().backward()
            outputs.append(out.detach())
            grads.append((a.grad, b.grad))
        torch.testing.assert_close(outputs[0], outputs[1])
        for got, expected in zip(grads[0], grads[1], strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_for_gpus_equal_the_operations_in_double(dtype, caplog, monkeypatch):
    """One graph of torch each, which the inductor makes a kernel of; it rounds once, whatever the strides."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # torch's compiler shows progress, whose thread never ends
    caplog.set_level(logging.WARNING)
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(5, n, generator=generator).to(dtype) for n in (12, 6))
    heads = torch.randn(2, 5, 8, generator=generator).to(dtype).transpose(0, 1)  # [t, heads, d], as attention has it
    angle = torch.randn(5, 1, 4, generator=generator)
    exact = x.double().requires_grad_()
    product = F.silu(exact[:, :6]) * exact[:, 6:]
    (slope,) = torch.autograd.grad(product, exact, grad.double())
    first, second = heads.double().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    cases = [
        (swiglu_kernel, (x,), product),
        (swiglu_gradient_kernel, (x, grad), slope),
        (rotation_kernel, (heads, cos, sin), rotated),
    ]
    for kernel, inputs, expected in cases:
        error = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
        got = Fused(kernel.written, backend="aot_eager")(*inputs)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected.detach(), rtol=error, atol=1e-6)
    assert caplog.records == [], "one could not be compiled"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_kernels_equal_the_operations_in_double(dtype, caplog, monkeypatch):
    """A row whose target is in another shard has a column outside of this one."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    caplog.set_level(logging.WARNING)
    generator = torch.Generator().manual_seed(5)
    rows, vocab = 5, 12
    logits = (4 * torch.randn(rows, vocab, generator=generator)).to(dtype)
    temperature, grad, grad_entropy = torch.rand(3, rows, 1, generator=generator) + 0.5
    columns = torch.tensor([[0], [11], [-1], [12], [5]])
    exact = logits.double().requires_grad_()
    every = (exact / temperature).log_softmax(-1)
    entropy, peak = -(every.exp() * every).sum(-1, keepdim=True), (exact / temperature).amax(-1)
    lse, z = (exact / temperature).logsumexp(-1, keepdim=True), exact / temperature - peak[:, None]
    sums = torch.stack([peak, z.exp().sum(-1), (z * z.exp()).sum(-1)]).detach().float()
    at_target = torch.where(torch.arange(vocab) == columns, every + lse, 0).sum(-1, keepdim=True) - lse
    for bonus in (True, False):
        got = Fused(sums_kernel.written, backend="aot_eager")(logits.clone(), temperature, bonus)
        torch.testing.assert_close(got, sums[: 2 + bonus], rtol=1e-5, atol=1e-6)
        loss = (at_target * grad).sum() + bonus * (entropy * grad_entropy).sum()
        (expected,) = torch.autograd.grad(loss, exact, retain_graph=True)
        inputs = [columns, temperature, lse.detach().float(), grad]
        inputs += [entropy.detach().float(), grad_entropy] if bonus else []
        slope = Fused(logit_gradient_kernel.written, backend="aot_eager")(logits.clone(), dtype, *inputs)
        assert slope.dtype is dtype
        error = 2.0**-8 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(slope.double(), expected, rtol=error, atol=1e-6)
    assert caplog.records == [], "one could not be compiled"


def test_kernel_that_cannot_be_compiled_is_computed_as_written(caplog):
    def depends_on_data(x):
        return x * 2 if x.sum().item() > 0 else x * 3

    kernel = Fused(depends_on_data, backend="aot_eager")
    assert kernel(torch.ones(3)).tolist() == [2.0] * 3 and kernel(-torch.ones(3)).tolist() == [-3.0] * 3
    [warning] = [record.getMessage() for record in caplog.records if "depends_on_data" in record.getMessage()]
    assert "cannot be compiled" in warning


def test_kernel_of_too_many_kinds_is_computed_as_written(caplog, monkeypatch):
    """torch compiles a function anew for each dtype, up to a limit."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)
    kernel = Fused(lambda x: x + 1, backend="aot_eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        assert all(kernel(torch.ones(3, dtype=dtype)).sum() == 6 for dtype in (torch.float32, torch.bfloat16))
    assert not kernel.is_compiled and "cannot be compiled" in caplog.text


def test_rotation_is_rounded_once():
    x = torch.randn(200, 2, 8, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    packed = pack_segments([200], 1.0 / 10000 ** (torch.arange(4) / 4), torch.bfloat16, kernel=False)
    assert packed.cos is not None and packed.sin is not None
    angle = torch.arange(200.0)[:, None, None] / 10000 ** (torch.arange(4) / 4)
    first, second = x.detach().double().chunk(2, -1)
    cos, sin = angle.double().cos(), angle.double().sin()
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    out = rotate(x, packed.cos, packed.sin)
    assert out.dtype is torch.bfloat16
    # At most half of bf16's last place, of 8 bits.
    assert ((out.double() - expected).abs() <= 1.01 * 2.0**-9 * expected.abs().clamp(min=0.01) * 2).all()
    (out * 2).sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.bfloat16


def test_padded_rows_keep_the_gradient_of_each():
    x = torch.randn(3, 2, requires_grad=True)
    gather, scatter = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 2])
    out = pad_rows(x, gather, scatter)
    (out * torch.tensor([[1.0], [2.0], [3.0], [0.0]])).sum().backward()  # padding gets no gradient from attention
    assert x.grad[:, 0].tolist() == [1.0, 2.0, 3.0]


# ---- Splits of the world into process groups, without processes


LARGE = [
    ParallelLayout(data=128, tensor=4),
    ParallelLayout(data=64, pipeline=2, tensor=4),
    ParallelLayout(data=16, pipeline=4, tensor=8),
]


@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_mesh_of_512_ranks_needs_few_splits(layout):
    """One operation for each group would be 645 to 971."""
    made = splits([whole_mesh(layout)], 512)
    assert len(made) <= 8
    for split in made:
        assert sorted(worker for group in split for worker in group) == list(range(512))
    assert made[0] == [(worker,) for worker in range(512)], "the groups of one member are made together"
    assert sum(all(len(group) == 1 for group in split) for split in made) == 1


def test_equal_splits_of_two_meshes_are_made_once():
    actor, critic = whole_mesh(ParallelLayout(data=2, tensor=2)), whole_mesh(ParallelLayout(data=4))
    alone = [(0,), (1,), (2,), (3,)]
    assert splits([actor, critic, actor], 4) == [alone, [(0, 2), (1, 3)], [(0, 1), (2, 3)]]


def test_one_worker_needs_no_split():
    assert splits([whole_mesh(ParallelLayout())], 1) == []


def test_meshes_on_separate_workers_share_splits():
    layout = ParallelLayout(data=2, tensor=2)
    made = splits([Mesh(layout, (0, 1, 2, 3)), Mesh(layout, (4, 5, 6, 7))], 8)
    assert made[1:] == [
        [(0, 1, 2, 3), (4, 5, 6, 7)],
        [(0, 2), (1, 3), (4, 6), (5, 7)],
        [(0, 1), (2, 3), (4, 5), (6, 7)],
    ]


def test_workers_outside_a_mesh_are_alone_in_its_splits():
    """Else they would have made fewer groups than others, and torch would name their next group differently."""
    made = splits([Mesh(ParallelLayout(pipeline=3), (1, 2, 3))], 5)
    assert made[1:] == [[(0,), (1, 2, 3), (4,)], [(0,), (1, 3), (2,), (4,)]]


def test_nccl_splits_the_world_once_for_each_axis(monkeypatch):
    made: list[list[list[int]]] = []

    def split_group(split_ranks, timeout):
        made.append(split_ranks)
        return next(group for group in map(tuple, split_ranks) if 37 in group)

    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "get_world_size", lambda: 512)
    mesh = whole_mesh(LARGE[2])
    device = Device(torch.device("cuda", 0), "nccl")
    formed: Any = form_meshes({"actor": mesh, "ref": mesh}, 37, Config().cluster, device)["actor"]
    assert made == [[list(group) for group in split] for split in splits([mesh], 512)]
    assert formed.tensor == tuple(range(32, 40)) and formed.pipeline == (37, 165, 293, 421)
    assert formed.data == tuple(range(5, 128, 8))


# ---- Fused steps of torch's Adam: where they run, and where a checkpoint puts the count of steps


def chained(inner):
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_adam_steps_fused_on_each_device(device):
    with FakeTensorMode():
        inner = torch.optim.AdamW([torch.empty(4, device=device).requires_grad_()])
        module._fuse(chained(inner))
    assert inner.param_groups[0]["fused"] is True


def test_other_optimizers_get_no_flag():
    inner = torch.optim.SGD([torch.zeros(4, requires_grad=True)], lr=0.1)
    module._fuse(chained(inner))
    module._fuse(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None)]))  # a stage without parameters
    assert not inner.param_groups[0].get("fused")


def test_fused_steps_equal_those_of_the_default():
    torch.manual_seed(2)
    start, gradients = torch.randn(64), torch.randn(3, 64)
    stepped = []
    for fuse in (True, False):
        parameter = start.clone().requires_grad_()
        inner = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
        if fuse:
            module._fuse(chained(inner))
        for gradient in gradients:
            parameter.grad = gradient.clone()
            inner.step()
        stepped.append(parameter.detach())
    torch.testing.assert_close(*stepped, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_restored_step_count_is_where_the_kernel_reads(fused, device):
    """The meta device stands in for a GPU."""
    key = torch.empty(4, device="meta", requires_grad=True)
    inner = torch.optim.AdamW([key])
    group = inner.param_groups[0] | {"fused": fused}
    held = HeldParameter(inner, group, key, 0)
    held.restore({"step": torch.tensor(3.0), "exp_avg": torch.empty(4, device="meta")})
    assert inner.state[key]["step"].device.type == device
