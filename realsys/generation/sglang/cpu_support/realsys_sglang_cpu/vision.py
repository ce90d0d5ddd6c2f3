"""The operators that torchvision wants registered when it is imported.

Its compiled part defines them, but does not load together with a CPU build of torch from another source. SGLang
imports torchvision for image models only, and never calls them here.
"""

import torch

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None  # an operator is gone with the library that defined it


def install() -> None:
    """Define the operators that are not there."""
    global _library
    if _library is None and not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in _OPERATORS:
            _library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
