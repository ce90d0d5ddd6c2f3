"""Bytes of a weight version from the memory of a trainer rank into the ranks of one engine. Only torch is imported.

    rank     file in shared memory ──pieces──> broadcast ─┐  one group for each transfer: rank 0 sends
    engine   tensors <── digest <── pieces <──────────────┘  the others are the ranks of one engine

The engine loads tensor after tensor in place. If one does not come, or is not the one that was sent, each of its ranks
puts back the weights that it had: these are in host memory, where a thread copies them after each load.
"""

from __future__ import annotations

import datetime
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed

_c10d: Any = torch.distributed  # without types

#: what the message of a failed load ends with if the engine has its earlier weights
UNDONE = "its earlier weights are back"
_PIECE = 64 << 20  # bytes of a broadcast
_ALIGNED = 8  # bytes; a view of another type begins at a multiple of its size
_SILENCE = datetime.timedelta(seconds=20)  # for which a member waits for the others, and a receiver for a piece
_WORDS = {"cpu": 1 << 15, "cuda": 1 << 24}  # words of a digest at a time: on a CPU they stay in its cache

Described = tuple[str, str, list[int], str]  # name, torch's name of the type, shape, digest


def digest(data: torch.Tensor) -> str:
    """Return a checksum of uint8 [bytes], computed on their device.

    The sum over all words of 8 bytes of the word times (2 * position + 1), modulo 2 ** 64: each changed word changes
    it, and so does an exchange of two words.
    """
    if missing := -len(data) % 8:
        data = torch.cat([data, data.new_zeros(missing)])
    total, count = len(data), _WORDS[data.device.type]
    places = 2 * torch.arange(count, dtype=torch.int64, device=data.device) + 1
    every = data.view(torch.int64)
    for begin in range(0, len(every), count):
        words = every[begin : begin + count]
        total += int((words * places[: len(words)]).sum()) + 2 * begin * int(words.sum())
    return f"{total % 2**64:016x}"


class TransferGroup:
    """A process group beside those of the process."""

    def __init__(
        self, store: Any, place: dict[str, Any], rank: int, own: str, limit: datetime.timedelta = _SILENCE
    ) -> None:
        """``place``: of the sender. ``own``: address at which this process can be reached. ``limit`` of a broadcast."""
        store = _c10d.PrefixStore(place["secret"], store)
        self.device = torch.device("cpu")
        if place["backend"] == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
            bounded = _c10d.ProcessGroupNCCL.Options()
            bounded._timeout = limit
            self._group: Any = _c10d.ProcessGroupNCCL(store, rank, place["members"], bounded)
        else:
            options = _c10d.ProcessGroupGloo._Options()
            options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=own)]
            options._timeout = limit
            self._group = _c10d.ProcessGroupGloo(store, rank, place["members"], options)
        self._limit = limit
        self._options = _c10d.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0

    def broadcast(self, data: torch.Tensor) -> None:
        """Send uint8 [bytes] if this is the sender, else fill them. Raises RuntimeError."""
        for begin in range(0, len(data), _PIECE):
            self._group.broadcast([data[begin : begin + _PIECE]], self._options).wait(self._limit)


# ---- sender


class Offer:
    """A sender that waits for its receivers. ``place`` tells them where."""

    def __init__(self, host: str, members: int, backend: str, limit_s: float) -> None:
        """``limit_s``: the receivers may take so long for what other senders send before."""
        self._limit = datetime.timedelta(seconds=limit_s)
        self._store = _c10d.TCPStore(host, 0, members, True, _SILENCE, wait_for_workers=False)
        secret = secrets.token_hex(16)  # who does not know it finds no group
        self.place: dict[str, Any] = {
            "host": host,
            "port": self._store.port,
            "secret": secret,
            "backend": backend,
            "members": members,
        }

    def send(self, data: torch.Tensor, parts: Sequence[tuple[int, int]], on_batch: Callable[[], object]) -> None:
        """Send tensors of ``data``, uint8 [bytes]. ``parts``: first byte and number of bytes of each.

        Raises RuntimeError if a receiver does not come, or ends.
        """
        receivers = range(1, self.place["members"])
        self._store.wait([_here(self.place, rank) for rank in receivers], _SILENCE)
        group = TransferGroup(self._store, self.place, 0, self.place["host"], self._limit)
        for batch in _batches([count for _, count in parts]):
            on_batch()
            mine = [data[start : start + count] for start, count in parts[batch]]
            group.broadcast((mine[0] if len(mine) == 1 else torch.cat(mine)).to(group.device))


def _batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the tensors that are sent together: as many as fit into a piece, or one."""
    begin = total = 0
    for at, size in enumerate(sizes):
        if total and total + size > _PIECE:
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if sizes:
        yield slice(begin, len(sizes))


def _here(place: dict[str, Any], rank: int) -> str:
    return f"{place['secret']}/here/{rank}"


# ---- receiver


def _join(place: dict[str, Any], rank: int) -> TransferGroup:
    store = _c10d.TCPStore(place["host"], place["port"], place["members"], False, _SILENCE, wait_for_workers=False)
    store.set(_here(place, rank), "")
    return TransferGroup(store, place, rank, _own_address(place["host"], place["port"]))


def _received(group: TransferGroup, described: Sequence[Described]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of one sender. Raises RuntimeError; ValueError for one that is not as it was sent."""
    sizes = [getattr(torch, dtype).itemsize * torch.Size(shape).numel() for _, dtype, shape, _ in described]
    for batch in _batches(sizes):
        data = torch.empty(sum(sizes[batch]), dtype=torch.uint8, device=group.device)
        group.broadcast(data)
        for (name, dtype, shape, mark), mine in zip(described[batch], torch.split(data, sizes[batch]), strict=True):
            own = mine.clone() if mine.storage_offset() % _ALIGNED else mine
            if (found := digest(own)) != mark:
                raise ValueError(f"tensor {name} arrived with digest {found}, not {mark}")
            yield name, own.view(getattr(torch, dtype)).view(shape)


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches the sender."""
    import socket

    with socket.create_connection((host, port), _SILENCE.total_seconds()) as connection:
        return str(connection.getsockname()[0])


def received(order: dict[str, Any], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors that the senders of ``order`` send to this rank; the first receiver is rank 1.

    It joins all senders first: they hear of its end at once, whoever sends.
    """
    groups = [_join(sender["place"], rank) for sender in order["senders"]]
    for group, sender in zip(groups, order["senders"], strict=True):
        yield from _received(group, sender["tensors"])


def agreed(ok: bool, group: Any) -> bool:
    """Return True on every rank of an engine if all of them call it with True. ``group``: theirs, of gloo."""
    vote = torch.tensor([int(ok)])
    torch.distributed.all_reduce(vote, torch.distributed.ReduceOp.MIN, group)
    return bool(vote)


class Receiver:
    """Loads versions into the model of one rank of an engine, or leaves it as it was.

    ``ranks``: group of the engine's ranks.
    """

    def __init__(self, model: torch.nn.Module, rank: int, ranks: Any) -> None:
        self._model = model
        self._rank = rank
        self._ranks = ranks
        self._kept: dict[str, torch.Tensor] = {}
        self._whole = False  # ``_kept`` has all weights of the last load
        self._keeping = threading.Thread(target=self._keep, name="keep-weights", daemon=True)
        self._keeping.start()

    def load(
        self, order: dict[str, Any], apply: Callable[[Iterator[tuple[str, torch.Tensor]]], object]
    ) -> tuple[bool, str]:
        """Give all tensors of ``order`` to ``apply``, which loads them. Returns whether that succeeded, and why not."""
        self.settle()
        problem, left = "", sum(len(sender["tensors"]) for sender in order["senders"])

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal left
            for named in received(order, self._rank):
                left -= 1
                yield named

        try:
            apply(counted())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not problem and left:
            problem = f"{left} tensors were not loaded"
        if not agreed(not problem, self._ranks):
            if not self._whole:  # its thread has failed, and printed why
                return (
                    False,
                    f"{problem or 'another rank of the engine failed'}; no copy of its earlier weights is whole",
                )
            self._put_back()
            return False, f"{problem or 'another rank of the engine failed'}; {UNDONE}"
        self.loaded()
        return True, ""

    def settle(self) -> None:
        """Return when the copy is complete."""
        self._keeping.join()

    def loaded(self) -> None:
        """Renew the copy, in a thread. Call it after each load, also of another kind."""
        self.settle()
        self._keeping = threading.Thread(target=self._keep, name="keep-weights", daemon=True)
        self._keeping.start()

    @torch.no_grad()
    def _keep(self) -> None:
        self._whole = False
        for name, weight in self._model.named_parameters():
            if name not in self._kept:
                self._kept[name] = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda)
            self._kept[name].copy_(weight)
        self._whole = True

    @torch.no_grad()
    def _put_back(self) -> None:
        for name, weight in self._model.named_parameters():
            weight.copy_(self._kept[name])
