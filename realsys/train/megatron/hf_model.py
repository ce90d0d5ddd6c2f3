"""Hugging Face models in Megatron: TransformerConfig for a layout, checkpoints to shards and back."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from realsys.config.allocation import ParallelLayout
from realsys.config.rank_memory import recomputed_layers
from realsys.config.schema_train import TrainConfig
from realsys.errors import ModelError
from realsys.model_files.architecture import HfModel, splits_over, stage_layers
from realsys.train.megatron.collectives import ReplicaReader, agreed
from realsys.train.megatron.device import Device
from realsys.train.megatron.lora import Adapter, adapter_of, base_of, is_adapter
from realsys.train.megatron.megatron_core import TransformerConfig
from realsys.weights.low_rank import factors_of

if TYPE_CHECKING:
    from realsys.train.megatron.mesh import MeshGroups

#: which tensors an export yields: as they are served; the gradients of the trained ones; without adapters; the
#: adapters alone (``factors_of``), by the names of the tensors that have one
Exported = Literal["served", "gradients", "frozen", "adapters"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_layout(model: HfModel, layout: ParallelLayout) -> None:
    """Check that the model divides by the layout. Raises ModelError with the numbers."""
    for name, size in model.split_sizes.items():
        if not splits_over(name, size, layout.tensor):
            raise ModelError(
                f"{name}={size} must divide by m{layout.tensor} of the training layout {layout}: choose another m"
            )
    if (rows := (model.heads + 2 * model.kv_heads) * model.head_dim) % layout.tensor:
        raise ModelError(
            f"the {rows} rows of query, key and value must divide by m{layout.tensor} of the training layout {layout}: "
            "choose another m"
        )
    if model.vocab_shard(layout.tensor) * (layout.tensor - 1) >= model.vocab:
        raise ModelError(
            f"vocab_size={model.vocab} leaves nothing for the last of m{layout.tensor} of the training layout {layout}:"
            " choose another m"
        )
    if model.layers < layout.pipeline:
        raise ModelError(
            f"num_hidden_layers={model.layers} must be at least p{layout.pipeline} of the training layout {layout}: "
            "choose another p"
        )


def transformer_config(model: HfModel, layout: ParallelLayout, train: TrainConfig, dtype: str) -> TransformerConfig:
    """Return Megatron's description of the model.

    Raises ModelError if it does not fit the layout.
    """
    check_layout(model, layout)
    recompute: dict[str, Any] = {}
    if again := recomputed_layers(train.recompute, model.layers):
        # Megatron recomputes the first layers of each stage, at most all: the last ones are the first to be freed.
        recompute = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": again}
    parameters = DTYPES[dtype]
    with warnings.catch_warnings():
        # the warning is about Megatron's own default
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return _megatron_config(model, layout, train, parameters, recompute)


def _megatron_config(
    model: HfModel, layout: ParallelLayout, train: TrainConfig, parameters: torch.dtype, recompute: dict[str, Any]
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=parameters,
        pipeline_dtype=parameters,
        bf16=parameters is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_model_parallel_layout=_stage_contents(model.layers, layout.pipeline),
        # With one tensor rank sequence parallelism has nothing to split.
        sequence_parallel=train.sequence_parallel and layout.tensor > 1,
        deterministic_mode=train.deterministic,
        # The checkpoint fills every parameter, so random initial values would be wasted work.
        # Megatron's own switch for that also drops the attributes that make the gradient norm right
        # under tensor parallelism.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        gradient_accumulation_fusion=False,  # needs Apex
        variable_seq_lengths=layout.pipeline > 1,
        batch_p2p_sync=False,  # it waits for the whole GPU after each send, for a defect of old versions of torch
        # Megatron refuses its default together with variable lengths
        moe_token_dispatcher_type="alltoall",
        **recompute,
    )


def _stage_contents(layers: int, stages: int) -> list[list[str]] | None:
    """Return Megatron's list of what each stage has; None without a pipeline."""
    if stages == 1:
        return None
    contents = [["decoder"] * count for count in stage_layers(layers, stages)]
    return [["embedding", *contents[0]], *contents[1:-1], [*contents[-1], "loss"]]


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# ---- weights, over tensor and pipeline ranks
#
#     q, k, v       -> linear_qkv   interleaved by query group
#     gate, up      -> linear_fc1   one below the other, within each tensor rank's shard
#     the rest      one to one
#
# A rank reads only its own slice of every tensor: the files are memory-mapped, and pages outside the slice stay
# untouched. All data ranks need the same slices; one of them reads for all (``ReplicaReader``).
#
# For export the tensors of a stage are divided among its data and tensor ranks. All of them write at the same time, and
# each tensor is written once.


Shape = tuple[int, ...]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_SCORE = "score.weight"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NAME_BYTES = 255  # longest file name
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True, slots=True)
class ParameterMap:
    """One Megatron parameter: its HF tensors, and the dimension along which tensor ranks split them
    (None: not split).
    """

    hf: tuple[str, ...]
    dim: int | None
    form: Literal["plain", "qkv", "gate_up"] = "plain"


def mapping_of(name: str, layer: int | None, tied: bool) -> ParameterMap:
    """Return the mapping of the GPTModel parameter ``name``.

    ``layer`` counts from 0 over the whole model.
    """
    if name == "embedding.word_embeddings.weight":
        return ParameterMap((_EMBEDDING,), 0)
    if name == "output_layer.weight":
        return ParameterMap((_EMBEDDING if tied else _HEAD,), 0)
    if name == "value_head.weight":
        return ParameterMap((_SCORE,), None)
    if name == "decoder.final_layernorm.weight":
        return ParameterMap(("model.norm.weight",), None)
    prefix = f"model.layers.{layer}."
    projections = tuple(f"{prefix}self_attn.{x}_proj" for x in "qkv")
    inside = {
        "input_layernorm.weight": ParameterMap((f"{prefix}input_layernorm.weight",), None),
        "pre_mlp_layernorm.weight": ParameterMap((f"{prefix}post_attention_layernorm.weight",), None),
        "self_attention.linear_qkv.weight": ParameterMap(tuple(f"{p}.weight" for p in projections), 0, "qkv"),
        "self_attention.linear_qkv.bias": ParameterMap(tuple(f"{p}.bias" for p in projections), 0, "qkv"),
        "self_attention.linear_proj.weight": ParameterMap((f"{prefix}self_attn.o_proj.weight",), 1),
        "self_attention.q_layernorm.weight": ParameterMap((f"{prefix}self_attn.q_norm.weight",), None),
        "self_attention.k_layernorm.weight": ParameterMap((f"{prefix}self_attn.k_norm.weight",), None),
        "mlp.linear_fc1.weight": ParameterMap(
            (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"), 0, "gate_up"
        ),
        "mlp.linear_fc2.weight": ParameterMap((f"{prefix}mlp.down_proj.weight",), 1),
    }
    return inside[name.split(".", 3)[3]]


class HFReader:
    """Reader of slices of the tensors of an HF directory: one file, or several with an index.

    Closing it unmaps the files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Any] = {}
        self._listing = directory / _INDEX  # the file that lists the tensors
        if self._listing.exists():
            self._files = self._read_index()
            return
        self._listing = directory / _SINGLE
        if not self._listing.exists():
            raise ModelError(f"{directory} must contain {_SINGLE} or {_INDEX}: convert the model to safetensors")
        self._files = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.clear()

    def check(self, model: HfModel) -> None:
        """Check the tensors against ``model``.

        Raises ModelError with file and tensor if one is missing, unknown or of another shape or
        dtype.
        """
        shapes = model.tensor_shapes()
        # Some writers store a tied head. A value role does not use the head of a language model.
        ignored = {_HEAD} if model.tied or model.head == "value" else set()
        extra = [n for n in self._files.keys() - shapes.keys() - ignored if not n.endswith("rotary_emb.inv_freq")]
        if extra:
            raise ModelError(
                f"{self._listing}: tensor {min(extra)} is not part of the model that config.json describes"
            )
        for name, shape in shapes.items():
            if name not in self._files:
                raise ModelError(f"{self._listing}: tensor {name} not found; config.json requires one of shape {shape}")
            view = self._view(name)
            path = self._directory / self._files[name]
            if (stored := tuple(view.get_shape())) != shape:
                raise ModelError(f"{path}: tensor {name} has shape {stored}, config.json requires {shape}")
            if view.get_dtype() not in _DTYPES:
                raise ModelError(f"{path}: tensor {name} is {view.get_dtype()}: must be one of {', '.join(_DTYPES)}")

    def read(self, name: str, dim: int | None, part: int, parts: int) -> torch.Tensor:
        """Return part ``part`` of ``parts`` along ``dim``: a view of the mapped file, in the file's
        dtype. If the parts do not divide the tensor, the last ones are smaller.
        """
        view = self._view(name)
        if dim is None or parts == 1:
            whole: torch.Tensor = view[:]
            return whole
        size = view.get_shape()[dim]
        step = -(-size // parts)
        window = slice(part * step, min((part + 1) * step, size))
        piece: torch.Tensor = view[window] if dim == 0 else view[:, window]
        return piece

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the type of the concatenation of tensors."""
        return functools.reduce(torch.promote_types, (_DTYPES[self._view(name).get_dtype()] for name in names))

    def _read_index(self) -> dict[str, str]:
        try:
            files: dict[str, str] = json.loads(self._listing.read_text())["weight_map"]
            names = set(files.values())
            if strange := [name for name in names if Path(name).name != name or len(name.encode()) > _NAME_BYTES]:
                raise ValueError(f"{strange[0][:80]!r} is not a file in this directory")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"{self._listing} must be an index of safetensors with a weight_map ({error!r})"
            ) from error
        for file in sorted(names):
            if not (self._directory / file).is_file():
                tensors = [tensor for tensor, owner in files.items() if owner == file]
                problem = f"file {file} not found, which should hold {len(tensors)} tensors, such as {min(tensors)}"
                raise ModelError(f"{self._listing}: {problem}")
        return files

    def _view(self, name: str) -> Any:
        file = self._file(self._files[name])
        try:
            return file.get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{self._directory / self._files[name]}: tensor {name}: {error}") from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._directory / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self._directory / file}: cannot be read: {error}") from error
        return self._open[file]


@dataclass(frozen=True, slots=True)
class ShardMap:
    """The mapping for one rank, which holds shard ``tensor_rank`` of ``tensor_ranks``."""

    model: HfModel
    tensor_rank: int
    tensor_ranks: int

    def parameters(self, module: torch.nn.Module) -> Iterator[tuple[str, ParameterMap, torch.nn.Parameter]]:
        """Yield the parameters of a GPTModel by name, in the same order on all tensor and data
        ranks of a stage.

        Adapters are excluded: no HF tensor consists of one alone.
        """
        decoder: Any = module.decoder
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                continue
            match = re.match(r"decoder\.layers\.(\d+)\.", name)
            layer = decoder.layers[int(match[1])].layer_number - 1 if match else None
            yield name, mapping_of(name, layer, self.model.tied), parameter

    def load(self, module: torch.nn.Module, directory: Path, groups: MeshGroups, device: Device) -> None:
        """Fill the module from an HF directory. Every rank of the mesh must call it.

        Raises ModelError on all ranks if the directory of one of them does not hold this model.
        """
        with contextlib.ExitStack() as stack:

            def opened() -> HFReader:
                reader = stack.enter_context(HFReader(directory))
                reader.check(self.model)
                return reader

            reader = agreed(groups.whole, opened, ModelError)
            self.fill(module, reader, ReplicaReader(groups.data, device, ModelError))

    @torch.no_grad()
    def fill(self, module: torch.nn.Module, reader: HFReader, replicas: ReplicaReader) -> None:
        """Fill the parameters. A rank that reads for itself needs memory for the module and for one parameter."""
        parameters = list(self.parameters(module))
        wanted = [
            [_Shard(self, mapping, parameter, reader, replicas.alone)] if self._is_stored(mapping) else []
            for _, mapping, parameter in parameters
        ]
        for (_, _, parameter), found in zip(parameters, replicas.read(wanted), strict=True):
            rows = sum(map(len, found))
            for joined in found:
                parameter[:rows].copy_(joined)
            parameter[rows:].zero_()  # rows beyond the vocabulary, or a value head that is not stored

    def _is_stored(self, mapping: ParameterMap) -> bool:
        return mapping.hf != (_SCORE,) or self.model.has_score

    def rows(self, mapping: ParameterMap, parameter: torch.Tensor) -> int:
        """Return the number of rows of this rank's shard that are not padding."""
        if mapping.hf[0] not in (_EMBEDDING, _HEAD):
            return len(parameter)
        return max(0, min(len(parameter), self.model.vocab - self.tensor_rank * len(parameter)))

    @torch.no_grad()
    def export(
        self,
        module: torch.nn.Module,
        *,
        data_rank: int,
        data_ranks: int,
        group: dist.ProcessGroup,
        skip_head: bool,
        what: Exported = "served",
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the HF tensors that this rank writes, whole. Every rank of
        ``group`` (tensor) must run it to its end.

        ``skip_head``: the head of a tied model on a later stage is a copy of the first stage's
        embedding. There are no gradients of matrices under adapters. A rank writes the adapters of its tensors.
        """
        gradients = what == "gradients"
        items = [item for item in self.parameters(module) if not gradients or item[2].requires_grad]
        writers = assign_writers([parameter.numel() for _, _, parameter in items], data_ranks * self.tensor_ranks)
        for (name, mapping, parameter), writer in zip(items, writers, strict=True):
            if skip_head and mapping.hf == (_EMBEDDING,):
                continue
            data_owner, tensor_owner = divmod(writer, self.tensor_ranks)
            # Other data ranks hold the same shard. All tensor ranks of the writer's data rank take
            # part in the gather.
            if data_owner != data_rank:
                continue
            if what == "adapters":
                if (adapter := adapter_of(module, name)) is not None:
                    yield from self._adapter(mapping, adapter, tensor_owner, group)
                continue
            source = base_of(module, name, parameter) if what == "frozen" else parameter
            source = parameter.main_grad if gradients else source.detach()  # type: ignore[attr-defined]
            for tensor, whole in self._whole(mapping, source, tensor_owner, group):
                yield tensor, whole[: self.model.vocab] if tensor in (_EMBEDDING, _HEAD) else whole

    def read(self, mapping: ParameterMap, reader: HFReader) -> torch.Tensor:
        """Return this rank's shard; rows of padding at its end are not there."""
        # With more ranks than key-value heads a shard is not whole heads. Megatron gathers the products.
        shared = mapping.form == "qkv" and self.tensor_ranks > self.model.kv_heads
        part, parts = (0, 1) if shared else (self.tensor_rank, self.tensor_ranks)
        joined = self._join(mapping, [reader.read(name, mapping.dim, part, parts) for name in mapping.hf])
        return joined.chunk(self.tensor_ranks)[self.tensor_rank] if shared else joined

    def _whole(
        self, mapping: ParameterMap, shard: torch.Tensor, owner: int, group: dist.ProcessGroup
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole HF tensors on rank ``owner``. A collective of ``group`` (tensor)."""
        if mapping.form == "qkv":  # gathered before it is split, see ``read``
            gathered = self._gather(shard, mapping.dim, owner, group)
            if gathered is not None:
                yield from zip(mapping.hf, self.split(mapping, gathered), strict=True)
            return
        for tensor, part in zip(mapping.hf, self.split(mapping, shard), strict=True):
            whole = self._gather(part, mapping.dim, owner, group)
            if whole is not None:
                yield tensor, whole

    def _adapter(
        self, mapping: ParameterMap, adapter: Adapter, owner: int, group: dist.ProcessGroup
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole adapters of the HF tensors on rank ``owner``. A collective of ``group`` (tensor)."""
        split_input = mapping.dim == 1
        a = self._gather(adapter.a.detach(), 1 if split_input else None, owner, group)
        # The rows of B are those of the matrix.
        rows = replace(mapping, dim=None) if split_input else mapping
        for tensor, b in self._whole(rows, adapter.b.detach(), owner, group):
            assert a is not None
            yield tensor, factors_of(a, b)

    def _gather(self, part: torch.Tensor, dim: int | None, owner: int, group: dist.ProcessGroup) -> torch.Tensor | None:
        if dim is None or self.tensor_ranks == 1:
            return part if self.tensor_rank == owner else None
        part = part.contiguous()
        mine = self.tensor_rank == owner
        parts = [torch.empty_like(part) for _ in range(self.tensor_ranks)] if mine else None
        dist.gather(part, parts, group_dst=owner, group=group)
        return None if parts is None else torch.cat(parts, dim)

    def _join(self, mapping: ParameterMap, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join slices of the HF tensors to a Megatron shard; of q, k and v, those of some key-value heads."""
        if mapping.form == "plain":
            return parts[0]
        if mapping.form == "gate_up":
            return torch.cat(parts)
        groups = len(parts[1]) // self.model.head_dim
        return torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in parts], 1).reshape(-1, *parts[0].shape[1:])

    def split(self, mapping: ParameterMap, shard: torch.Tensor) -> list[torch.Tensor]:
        """Split a Megatron shard into slices of the HF tensors: the inverse of ``_join``."""
        if mapping.form == "plain":
            return [shard]
        if mapping.form == "gate_up":
            return list(shard.chunk(2))
        per_group = self.model.heads // self.model.kv_heads * self.model.head_dim
        sizes = [per_group, self.model.head_dim, self.model.head_dim]
        groups, rest = len(shard) // sum(sizes), shard.shape[1:]
        pieces = torch.split(shard.reshape(groups, sum(sizes), *rest), sizes, 1)
        return [piece.reshape(-1, *rest) for piece in pieces]


@dataclass(frozen=True, slots=True)
class _Shard:
    """A rank's shard of one parameter in an HF directory, without padding. ``alone``: no other rank reads it, too."""

    shared: ClassVar[bool] = True

    shards: ShardMap
    mapping: ParameterMap
    parameter: torch.Tensor
    reader: HFReader
    alone: bool

    @property
    def nbytes(self) -> int:
        return self.parameter.nbytes

    def read(self) -> torch.Tensor:
        joined = self.shards.read(self.mapping, self.reader)
        # A view of the mapped file would be read in the broadcast, while the other ranks wait for it.
        return joined if self.alone else joined.clone()

    def blank(self, device: torch.device) -> torch.Tensor:
        shape = (self.shards.rows(self.mapping, self.parameter), *self.parameter.shape[1:])
        return torch.empty(shape, dtype=self.reader.dtype(self.mapping.hf), device=device)


def assign_writers(sizes: list[int], writers: int) -> list[int]:
    """Return the writer of each item: largest item first, to the writer with the least so far; the
    same on every rank.
    """
    loads = [0] * writers
    owner = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        writer = loads.index(min(loads))
        owner[item] = writer
        loads[writer] += sizes[item]
    return owner
