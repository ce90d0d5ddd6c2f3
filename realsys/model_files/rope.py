"""Frequencies of rotary position embeddings. Imports torch, whose float32 power is the one that transformers uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from realsys.model_files.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return radians per position, float32 [head_dim / 2], bit for bit as transformers computes them.

    numpy's power differs in the last bit for half of the sizes, so a log-prob would no longer be reproducible.
    The caller multiplies the rotated vectors by ``rope.magnitude``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        # the low frequencies by the factor, the high ones as they are, those between blended (Llama 3.1)
        wavelength = 2 * math.pi / inverse
        longest = rope.original_positions / rope.low_freq_factor
        shortest = rope.original_positions / rope.high_freq_factor
        blend = (rope.original_positions / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - blend) * inverse / rope.factor + blend * inverse
        stretched = torch.where(wavelength > longest, inverse / rope.factor, inverse)
        return torch.where((wavelength <= longest) & (wavelength >= shortest), blended, stretched)
    if rope.kind == "yarn":
        return _ramp(rope, head_dim, inverse, 1.0 / (rope.factor * rope.theta**exponents))
    return inverse


def _ramp(rope: Rope, head_dim: int, kept: Tensor, divided: Tensor) -> Tensor:
    """Go from the frequencies ``kept`` to ``divided``, linearly over the dimensions between the two betas (YaRN)."""

    def dimension(rotations: float) -> float:
        """Return the dimension whose angle makes ``rotations`` turns over the original positions."""
        ratio = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high: float = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001  # transformers does the same; the ramp would divide by zero
    weight = 1 - torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return divided * (1 - weight) + kept * weight
