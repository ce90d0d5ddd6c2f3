"""Nothing in the package turns bytes into code: no pickle, marshal, eval, exec; no unsafe reader of numpy or torch."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: a part of SGLang in its interpreter; the inside of the sandbox, which is there to run programs
FOREIGN = {
    ROOT / "realsys" / "generation" / "sglang" / "cpu_support",
    ROOT / "realsys" / "reward" / "sandbox" / "inside",
}
FILES = sorted(
    path
    for package in ("realsys", "workers", "launch")
    for path in (ROOT / package).rglob("*.py")
    if not FOREIGN & set(path.parents)
)
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
#: call -> the keyword that makes it safe, and its value; None: never
CALLS: dict[str, tuple[str, bool] | None] = {
    "torch.load": ("weights_only", True),
    "torch.save": None,
    "numpy.load": ("allow_pickle", False),
    "yaml.load": None,
    "yaml.unsafe_load": None,
    "yaml.full_load": None,
    "socket.recv_pyobj": None,
    "socket.send_pyobj": None,
}
#: of sockets and of collectives that pickle
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "broadcast_object_list",
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
}


def problems(source):
    tree = ast.parse(source)
    names: dict[str, str] = {}  # local name -> full name
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if (node.module or "").partition(".")[0] in MODULES:
                found.append(f"{node.lineno}: from {node.module} import")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += call_problem(node, names)
    return found


def call_problem(node, names):
    text = ast.unparse(node.func)
    head, _, rest = text.partition(".")
    name = names.get(head, head) + (f".{rest}" if rest else "")
    if isinstance(node.func, ast.Name) and text in BUILTINS and text not in names:
        return [f"{node.lineno}: {text}(...)"]
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        return [f"{node.lineno}: {text}(...)"]
    if name not in CALLS:
        return []
    safe = CALLS[name]
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if safe and isinstance(value := given.get(safe[0]), ast.Constant) and value.value is safe[1]:
        return []
    return [f"{node.lineno}: {name}(...)"]


def test_no_module_turns_bytes_into_code():
    assert len(FILES) > 150
    found = [f"{path.relative_to(ROOT)}:{problem}" for path in FILES for problem in problems(path.read_text())]
    assert found == []
