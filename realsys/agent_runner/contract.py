"""Contract of a user's agent, the call of its ``run``, and the description of its errors."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from typing import Any

NATIVE, CAPTURED = "native", "captured"
OFFERED = ("base_url", "api_key", "http_client")  # arguments of run, besides the row of the dataset
_MESSAGE = 500  # characters of an exception
_HERE = os.path.dirname(os.path.realpath(__file__))
_PACKAGE = os.path.dirname(_HERE) if os.path.basename(os.path.dirname(_HERE)) == "realsys" else _HERE
#: beginnings of paths that are not the user's code
NOT_OF_THE_USER = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (_PACKAGE, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    if folder
)
_CONTRACT = "it must take (data, base_url, api_key, http_client), or (task, session) in a class built with parts"


def kind_of(loaded: Any) -> tuple[str, str]:
    """Return NATIVE or CAPTURED for a class or function, and the problem with it; "" if it satisfies a contract.

    A class whose ``run`` takes (task, session) is native, and so is a function that takes ``parts``: it makes agents.
    """
    if not callable(loaded):
        return "", f"it must be a class or a function, not {type(loaded).__name__}"
    made = not _is_class(loaded)
    if not made and not callable(getattr(loaded, "run", None)):
        return "", "the class lacks run"
    try:
        parameters = _run_parameters(loaded)
    except (TypeError, ValueError):
        return "", "the signature of run cannot be read: write it in Python"
    if made and parameters and parameters[0].name == "parts":
        return NATIVE, ""
    signature, named = inspect.Signature(parameters), _offered(parameters)
    native = not made and _fits(signature.bind, "task", "session")
    captured = "base_url" in named and _fits(signature.bind_partial if made else signature.bind, "data", **named)
    if native and captured and "base_url" not in signature.parameters:
        return "", f"run takes {signature}, which does not tell its contract: {_CONTRACT}"
    if native or captured:
        return (CAPTURED if captured else NATIVE), ""
    return "", f"run takes {signature}: {_CONTRACT}"


def problem_of(loaded: Any, arguments: dict[str, Any]) -> str:
    """Return why this interpreter cannot run an agent with base_url and ``rollout.agent_args``; "" if it can."""
    kind, problem = kind_of(loaded)
    if kind == NATIVE:
        return "it takes (task, session) and runs in a RolloutWorker only: unset rollout.agent_python"
    return problem or argument_problem(loaded, kind, arguments)


def argument_problem(loaded: Any, kind: str, arguments: dict[str, Any]) -> str:
    """Return why ``rollout.agent_args`` do not fit the agent; "" if they do."""
    first: list[Any] = [None] if kind == NATIVE or not _is_class(loaded) else []
    named = _offered(_run_parameters(loaded)) if kind == CAPTURED and not _is_class(loaded) else {}
    try:
        inspect.signature(loaded).bind(*first, **named, **arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _run_parameters(loaded: Any) -> list[inspect.Parameter]:
    """Return the parameters of a class's run without self, or of a function. Raises TypeError or ValueError."""
    if not _is_class(loaded):
        return list(inspect.signature(loaded).parameters.values())
    parameters = list(inspect.signature(loaded.run).parameters.values())
    static = isinstance(inspect.getattr_static(loaded, "run"), (staticmethod, classmethod))
    return parameters if static else parameters[1:]


def _offered(parameters: Sequence[inspect.Parameter]) -> dict[str, None]:
    """Return those of OFFERED that can be passed by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return {name: None for name in OFFERED if takes_all or name in names}


def _is_class(loaded: Any) -> bool:
    return inspect.isclass(loaded)


def _fits(bind: Callable[..., Any], *given: Any, **named: Any) -> bool:
    try:
        bind(*given, **named)
    except TypeError:
        return False
    return True


def load(name: str) -> Any:
    """Import ``package.module:attribute``."""
    module, _, attribute = name.partition(":")
    loaded: Any = importlib.import_module(module)
    for part in attribute.split("."):
        loaded = getattr(loaded, part)
    return loaded


class CapturedRun:
    """A user's ``run``, ready to be called: the class is built, the arguments of a function are bound.

    ``make_client`` makes the http_client of an episode, whose requests may take ``timeout_s``.
    """

    def __init__(self, loaded: Any, arguments: dict[str, Any], timeout_s: float) -> None:
        self._offered = _offered(_run_parameters(loaded))
        run = loaded(**arguments).run if _is_class(loaded) else loaded
        self._run: Callable[..., Any] = run if _is_class(loaded) else functools.partial(run, **arguments)
        self.is_async = inspect.iscoroutinefunction(run)
        wanted = "http_client" in self._offered
        self.make_client = client_maker(self.is_async, timeout_s) if wanted else lambda: None

    def call(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> Any:
        """Call it; the result of an async function must be awaited."""
        given = {"base_url": base_url, "api_key": api_key, "http_client": http_client}
        return self._run(data, **{name: given[name] for name in self._offered})


def is_async(loaded: Any) -> bool:
    """Return True if the ``run`` of a class, or the function, is async."""
    return inspect.iscoroutinefunction(loaded.run if _is_class(loaded) else loaded)


def client_maker(is_async: bool, timeout_s: float) -> Callable[[], Any]:
    """Return a function that makes an HTTP client of httpx, or None if this interpreter has no httpx.

    Its requests may take ``timeout_s``. It uses no proxies.
    """
    try:
        httpx = importlib.import_module("httpx")
    except ImportError:
        return lambda: None
    settings = {
        "timeout": httpx.Timeout(timeout_s, connect=30.0),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
        "trust_env": False,
        "verify": httpx.create_ssl_context(),  # takes longer than the start of an episode
    }
    httpx.Client(**settings).close()  # imports what the first client needs, once for all episodes
    return functools.partial(httpx.AsyncClient if is_async else httpx.Client, **settings)


class Failed(dict):  # type: ignore[type-arg]  # so that it travels as JSON
    """Error of an agent: type, message, place (file:line in the user's code) and the source line there."""

    def in_words(self) -> str:
        line = f": {self['line']}" if self["line"] else ""
        return f"{self['type']}: {self['message']} ({self['place']}{line})"


def described(error: BaseException) -> Failed:
    """Describe an error. Of an exception group its first exception counts."""
    while isinstance(getattr(error, "exceptions", None), tuple):
        error = error.exceptions[0]  # type: ignore[attr-defined]
    try:
        text = one_line(str(error))
    except Exception:  # the user's class may do anything
        text = "its message cannot be printed"
    place = place_of(error, NOT_OF_THE_USER)
    file, _, number = place.rpartition(":")
    line = one_line(linecache.getline(file, int(number))) if number.isdigit() else ""
    return Failed({"type": type(error).__name__, "message": text, "place": one_line(place), "line": line})


def one_line(text: str) -> str:
    """Return the beginning of a text, in one line that can be encoded."""
    return " ".join(text[:_MESSAGE].encode("utf-8", "backslashreplace").decode().split())


def place_of(error: BaseException, skipped: tuple[str, ...]) -> str:
    """Return file and line of the innermost frame whose path does not begin with ``skipped``, else of the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not os.path.realpath(frame.filename).startswith(skipped)]
    if not frames:
        return "no traceback"
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
