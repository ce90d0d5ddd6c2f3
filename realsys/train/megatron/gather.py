"""Bytes of every rank of a process group, on every rank. torch's own function for objects would unpickle them."""

from __future__ import annotations

import torch
import torch.distributed as dist


def gather_bytes(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return what each rank of ``group`` passed as ``own``, in the order of the ranks. Every rank must call it."""
    if group.size() == 1:
        return [own]
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    size = torch.tensor([len(own)], device=device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
    mine = mine.to(device)
    parts = [torch.empty_like(mine) for _ in lengths]
    if len(mine):
        dist.all_gather(parts, mine, group=group)
    return [part[:length].cpu().numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
