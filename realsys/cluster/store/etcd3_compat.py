"""Makes ``etcd3`` 0.12 importable next to protobuf >= 4, without touching the installed package.

The generated ``*_pb2.py`` files of etcd3 build their descriptors by hand, which protobuf refuses since version 4. Each
file also contains its serialized FileDescriptorProto. This module reads that literal from the source text and adds it
to a private descriptor pool, because other etcd clients register the same file names in the default pool. It publishes
the resulting classes as ``etcd3.etcdrpc.{kv,auth,rpc}_pb2`` before ``etcd3`` imports them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from realsys.errors import NameStoreError

_FILES = ("kv", "auth", "rpc")  # import order: each needs the ones before it
_lock = threading.Lock()


def import_etcd3() -> Any:
    """Return the ``etcd3`` module. Raises NameStoreError if it is not installed or has an unknown layout."""
    with _lock:
        if "etcd3" not in sys.modules:
            _load(_find_package().parent)
        return sys.modules["etcd3"]


def _load(package: Path) -> None:
    before = set(sys.modules)
    try:
        _publish_messages(package)
        importlib.import_module("etcd3")
    except Exception as exc:
        # A partly loaded etcd3 in sys.modules would make the next attempt fail for a misleading reason.
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "etcd3":
                del sys.modules[name]
        raise NameStoreError(
            f"name store: cannot load etcd3 from {package}: {type(exc).__name__}: {exc}; "
            "install etcd3==0.12.0, or use cluster.name_store.backend=file"
        ) from exc


def _find_package() -> Path:
    spec = importlib.util.find_spec("etcd3")  # finds a top-level package without importing it
    if spec is None or spec.origin is None:
        raise NameStoreError(
            "name store: the Python package etcd3 is not installed; install etcd3==0.12.0, "
            "or use cluster.name_store.backend=file"
        )
    return Path(spec.origin)


def _publish_messages(package: Path) -> None:
    from google.protobuf.descriptor_pool import DescriptorPool

    folder = package / "etcdrpc"
    pool = DescriptorPool()
    rpc = _new_package("etcd3.etcdrpc", folder)
    for name in _FILES:
        module = _message_module(f"etcd3.etcdrpc.{name}_pb2", _serialized(folder / f"{name}_pb2.py"), pool)
        sys.modules[module.__name__] = module
        setattr(rpc, f"{name}_pb2", module)
    _copy_public(vars(rpc.rpc_pb2), rpc)
    _copy_public(vars(_load_stubs(package, rpc)), rpc)


def _new_package(name: str, folder: Path) -> Any:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return package


def _serialized(source: Path) -> bytes:
    """Return the FileDescriptorProto of a generated module. Reads the source text and executes none of it."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.keyword) or node.arg != "serialized_pb":
            continue
        value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value  # _b('...') or b'...'
        literal = ast.literal_eval(value)
        return literal.encode("latin1") if isinstance(literal, str) else bytes(literal)
    raise ValueError(f"{source} has no serialized descriptor")


def _message_module(name: str, serialized: bytes, pool: Any) -> ModuleType:
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.internal import enum_type_wrapper

    pool.AddSerializedFile(serialized)
    descriptor = pool.FindFileByName(descriptor_pb2.FileDescriptorProto.FromString(serialized).name)
    module = ModuleType(name)
    content: dict[str, Any] = {"DESCRIPTOR": descriptor}
    for message, message_type in descriptor.message_types_by_name.items():
        content[message] = message_factory.GetMessageClass(message_type)
    for enum, enum_type in descriptor.enum_types_by_name.items():
        content[enum] = enum_type_wrapper.EnumTypeWrapper(enum_type)
        content.update((value.name, value.number) for value in enum_type.values)
    vars(module).update(content)
    return module


def _load_stubs(package: Path, rpc: Any) -> ModuleType:
    """Load ``rpc_pb2_grpc``, the only generated module that still works, with a stand-in for its parent package."""
    name = "etcd3.etcdrpc.rpc_pb2_grpc"
    spec = importlib.machinery.PathFinder.find_spec(name, [str(package / "etcdrpc")])
    if spec is None or spec.loader is None:
        raise ValueError(f"{package} has no {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent = _new_package("etcd3", package)
    parent.etcdrpc = rpc
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["etcd3"]
    return module


def _copy_public(content: Mapping[str, Any], target: ModuleType) -> None:
    vars(target).update((name, value) for name, value in content.items() if not name.startswith("_"))
