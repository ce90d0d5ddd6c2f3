"""A stand-in for ``sgl_kernel``: its wheels are for GPUs, and SGLang imports names from it everywhere.

Any name can be imported. The few that SGLang calls on a CPU are implemented in torch; a call of any other raises.
"""

import importlib.machinery
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

import torch

PACKAGE = "sgl_kernel"


def install() -> None:
    """Let ``import sgl_kernel`` succeed, unless it does anyway."""
    if importlib.util.find_spec(PACKAGE) is None:
        sys.meta_path.append(_Finder())


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    """Write the cache slots of new tokens into the table of requests: ``table[rows[i], starts[i]:ends[i]]``."""
    lengths = (ends - starts).tolist()
    for row, start, new in zip(rows.tolist(), starts.tolist(), torch.split(slots, lengths), strict=True):
        table[row, start : start + len(new)] = new.to(table.dtype)


_IMPLEMENTED = {"assign_req_to_token_pool_cpu": assign_req_to_token_pool_cpu}


class _Missing:
    """A kernel that is not there. May be looked at in any way, but not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> "_Missing":
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Missing(f"{self.__name__}.{attribute}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} has no implementation on a CPU (package realsys-sglang-cpu)")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _IMPLEMENTED.get(name) or _Missing(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    """Finds the package and whatever is imported from inside it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "0"
