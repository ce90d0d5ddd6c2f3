"""Fuzz targets: readers of model folders, of tensors and of verifier processes."""

import asyncio
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from realsys.cluster.files import FileInfo
from realsys.config.allocation import ParallelLayout, parse_allocation
from realsys.config.rules import check_model
from realsys.config.schema import Config, TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import CheckpointError, ConfigError, DataError, ModelError, RewardError, WeightsError
from realsys.generation.child.update import check_shapes
from realsys.model_files.config_json import read_model, read_sizes
from realsys.reward.pool import ItemLimits, VerifierProcess
from realsys.reward.verifier_protocol import MAX_REPLY, JournalReader, Reply
from realsys.reward.verifiers.contract import Verdict
from realsys.train.checkpoint.checkpoint_files import CheckpointPiece, RankIndex, data_file, rank_stem
from tests.support.fuzz.files import spoilt, through
from tests.support.fuzz.mutations import Spoiler, example
from tests.support.fuzz.targets import Target

TINY = TinyModelConfig(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=8,
    max_position_embeddings=64,
)
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ eos_token }}"


def folder_of_a_model(folder: Path) -> Iterator[Target]:
    """config.json and its neighbours, as a downloaded HF folder may have them."""
    make_tiny_model(TINY, folder, seed=1)
    write_char_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    config = folder / "config.json"
    more = {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, "sliding_window": None}
    config.write_text(json.dumps(json.loads(config.read_text()) | more))
    trial = Config.model_validate({"allocation": "serve.d1p1m1+d1p1m1", "data": {"max_prompt_tokens": 8}})
    trial = trial.model_copy(
        update={"generation": trial.generation.model_copy(update={"sampling": _sampling(trial, 16)})}
    )
    readers: dict[str, tuple[Path, Callable[[], object]]] = {
        "config.json, server": (config, lambda: read_model(folder).tensor_shapes()),
        "config.json, master": (config, lambda: read_sizes(folder)),
        "config.json, launcher": (config, lambda: check_model(folder, trial, parse_allocation(trial.allocation))),
        "generation_config.json": (folder / "generation_config.json", lambda: read_model(folder)),
        "tokenizer_config.json": (settings, lambda: _prompt(folder)),
        "tokenizer.json": (folder / "tokenizer.json", lambda: _prompt(folder)),
    }
    for name, (path, read) in readers.items():
        refused = (ModelError, ConfigError, DataError)
        yield Target(f"model: {name}", spoilt(path.read_bytes()), through(path, read), refused)
    file = folder / "model.safetensors"
    shapes = read_model(folder).tensor_shapes()
    check = through(file, lambda: check_shapes(folder, shapes))
    yield Target("model: shapes in safetensors", safetensors(file.read_bytes()), check, (WeightsError,))


def _sampling(config: Config, tokens: int) -> Any:
    return config.generation.sampling.model_copy(update={"max_new_tokens": tokens})


def _prompt(folder: Path) -> None:
    tokenizer = TextTokenizer(folder)
    tokenizer.completion_text(tokenizer.encode_prompt("1+2="))


def safetensors(valid: bytes) -> Callable[[Spoiler], bytes]:
    """Files with a spoilt header whose length is right, or spoilt anywhere."""
    size = int.from_bytes(valid[:8], "little")

    def make(spoiler: Spoiler) -> bytes:
        if spoiler.rng.random() < 0.3:
            return spoiler.spoil_bytes(valid)
        if spoiler.rng.random() < 0.1:
            return spoiler.rng.choice((1 << 63, (1 << 64) - 1, 1 << 40, 0, 7)).to_bytes(8, "little") + valid[8:]
        header = spoiler.spoil(valid[8 : 8 + size].rstrip())
        return struct.pack("<Q", len(header)) + header + valid[8 + size :]

    return make


def tensors(folder: Path) -> Iterator[Target]:
    """Readers that need torch: weights of a model folder, and the pieces of a checkpoint."""
    from realsys.generation.embedded.decoder import read_tensors
    from realsys.model_files.config_json import read_model
    from realsys.train.megatron.hf_model import HFReader

    make_tiny_model(TINY, folder, seed=1)
    model, file, config = read_model(folder), folder / "model.safetensors", folder / "config.json"

    def slices() -> None:
        with HFReader(folder) as reader:
            reader.check(model)
            reader.read("model.norm.weight", None, 0, 1).sum()

    valid = file.read_bytes()
    yield Target(
        "model: config.json, trainer",
        spoilt(config.read_bytes()),
        through(config, lambda: read_model(folder)),
        (ModelError,),
    )
    yield Target("model: safetensors, trainer", safetensors(valid), through(file, slices), (ModelError,))
    yield Target(
        "model: safetensors, server", safetensors(valid), through(file, lambda: read_tensors(folder)), (ModelError,)
    )
    index = folder / "model.safetensors.index.json"
    names = [name for name in json.loads(valid[8 : 8 + int.from_bytes(valid[:8], "little")]) if name != "__metadata__"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file.name)}))
    yield Target("model: index of safetensors", spoilt(index.read_bytes()), through(index, slices), (ModelError,))
    (folder / "checkpoint").mkdir()
    yield from _pieces(folder / "checkpoint")


def _pieces(folder: Path) -> Iterator[Target]:
    """An index with a right checksum, as far as its reader knows, of pieces that make no sense."""
    import msgspec

    from realsys.train.checkpoint.tensors import PieceReader, whole_shard

    data, layout = np.arange(12, dtype="<f4").tobytes(), ParallelLayout()
    (folder / data_file(rank_stem("actor", 0, 1))).write_bytes(bytes(8) + data)
    halves = [data[:24], data[24:]]
    pieces = [
        CheckpointPiece(
            "param",
            "w",
            (4, 3),
            (0, 0),
            (4, 3),
            6 * k,
            6 * k + 6,
            "float32",
            8 + 24 * k,
            24,
            xxhash.xxh3_64_hexdigest(half),
        )
        for k, half in enumerate(halves)
    ]
    rank = RankIndex("actor", 1, layout, 0, {}, None, {}, FileInfo(8 + len(data), ""), pieces)
    valid = json.loads(msgspec.json.encode(rank))

    def make(spoiler: Spoiler) -> bytes:
        value = json.loads(json.dumps(valid))
        at = spoiler.rng.randrange(2)
        value["pieces"][at] = spoiler.spoil_value(value["pieces"][at])
        return spoiler.encode(value)

    def read(raw: bytes) -> None:
        from realsys.train.checkpoint.checkpoint_files import decode_index

        with PieceReader(folder, [decode_index(raw, folder / "actor.json")]) as reader:
            reader.read("param", whole_shard("w", (4, 3)))

    yield Target("checkpoint: pieces", make, read, (CheckpointError,))


class _Ended:
    """A process that has exited with code 0."""

    pid = 1

    async def exits_within(self, timeout_s: float) -> bool:
        return True

    def reap(self) -> int:
        return 0


def verifier(_: Path) -> Iterator[Target]:
    """Messages of a verifier process, which a verifier may have damaged."""

    def make(spoiler: Spoiler) -> bytes:
        body = spoiler.spoil(spoiler.encode(example(Reply, spoiler.rng)))
        data = body + b"\n"
        return spoiler.spoil_bytes(data) if spoiler.rng.random() < 0.2 else data

    async def read(data: bytes) -> object:
        process: Any = VerifierProcess.__new__(VerifierProcess)
        process.process, process._child = _Ended(), SimpleNamespace(said=lambda: "")
        process._batches, process._reader = 1, asyncio.StreamReader()
        process._reader.feed_data(data)
        process._reader.feed_eof()
        return await process._reply(ItemLimits(60.0, 60.0), "to judge")

    def make_journal(spoiler: Spoiler) -> bytes:
        bodies = [spoiler.spoil(spoiler.encode(example(Verdict, spoiler.rng))) for _ in range(3)]
        data = b"".join(body + b"\n" for body in bodies)
        return spoiler.spoil_bytes(data) if spoiler.rng.random() < 0.2 else data

    def read_journal(data: bytes) -> object:
        journal = JournalReader()
        try:
            os.pwrite(journal.descriptor, data[:MAX_REPLY], 0)
            return journal.read(0, 3)
        finally:
            journal.close()

    yield Target("verifier: reply", make, lambda data: asyncio.run(read(data)), (RewardError,))
    yield Target("verifier: journal", make_journal, read_journal, (RewardError,))
