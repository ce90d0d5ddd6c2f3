"""The operators that torchvision wants registered when it is imported.

Its compiled part defines them, but does not load together with a CPU build of torch from another source. SGLang
imports torchvision for image models only, and never calls them here.
"""

import contextlib
import importlib.util
from pathlib import Path

import torch

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None  # an operator is gone with the library that defined it


def install() -> None:
    """Define the operators that are not there. A second definition, by the compiled part, would end the process."""
    global _library
    spec = importlib.util.find_spec("torchvision")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        for path in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    if _library is None and not hasattr(torch.ops.torchvision, "nms"):
        _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name in _OPERATORS:
            _library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
