"""Explicit-state exploration: every state that a small system can reach, each checked.

    initial ──> expand: every enabled action on a copy ──> check the new state ──> seen before? ──> queue ──┐
                  ^                                                                                        │
                  └────────────────────────────────────────────────────────────────────────────────────────┘

Breadth first, so that the path to a violation is a shortest one. An action with a cost is a fault: a state from which
no end can be reached by actions without cost is stuck, however the faults before it came about.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import marshal
import pickle
import traceback
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any, ClassVar, Protocol, TypeVar

_ATOMS = frozenset({str, bytes, int, bool, float, type(None)})
S = TypeVar("S", bound="System")


class Action(Protocol):
    """Something that can happen next. ``cost`` > 0: a fault."""

    @property
    def cost(self) -> int: ...


class System(Protocol):
    """A state. ``check`` and ``apply`` raise AssertionError (or any other error) on what must never happen."""

    def enabled(self) -> Iterable[Action]: ...

    def apply(self, action: Any) -> None: ...

    def check(self) -> None: ...

    def key(self) -> bytes: ...

    def is_final(self) -> bool: ...


class Violation(AssertionError):
    """A problem, and the shortest path to it."""

    def __init__(self, problem: str, path: Sequence[Action]) -> None:
        super().__init__("\n".join([problem, "after:", *(f"  {action}" for action in path)]))
        self.problem, self.path = problem, list(path)


@dataclass
class Found:
    """Statistics of an exploration to closure. ``actions``: how often each kind of action was taken, by name."""

    states: int = 0
    transitions: int = 0
    finals: dict[str, int] = field(default_factory=dict)
    actions: dict[str, int] = field(default_factory=dict)


class Copier:
    """Copies states through pickle; objects of the ``shared`` types never change and are not copied."""

    def __init__(self, *shared: type) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._table: dict[type, Callable[[Any], Any]] = {Counter: _reduce_counter}
        self._table |= dict.fromkeys(shared, self._reduce)

    def _reduce(self, shared: Any) -> tuple[Callable[[int], Any], tuple[int]]:
        number = self._numbers.setdefault(id(shared), len(self._objects))
        if number == len(self._objects):
            self._objects.append(shared)  # also keeps its id from being given to another
        return _Lookup.find, (number,)

    def dump(self, state: Any) -> bytes:
        _Lookup.objects = self._objects
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = self._table  # type: ignore[misc]
        pickler.dump(state)
        return buffer.getvalue()

    def load(self, dumped: bytes) -> Any:
        _Lookup.objects = self._objects
        return pickle.loads(dumped)


def _reduce_counter(counter: Counter[Any]) -> tuple[Any, ...]:
    """Have pickle fill a Counter as any dict: its own way counts the items again, which takes longer than the rest."""
    return copyreg.__newobj__, (Counter,), None, None, iter(counter.items())  # type: ignore[attr-defined]


class Passed:
    """Pure checks that have passed in one exploration, with their inputs: many states have the same ledger, or journal.

    All copies of a state share it: its type is one of the shared types of their Copier.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def once(self, check: Callable[[], None], *inputs: bytes) -> None:
        """Call ``check``, whose result depends on ``inputs`` only, unless it has passed with them."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (check.__name__.encode(), *inputs):
            digest.update(len(part).to_bytes(8, "big") + part)
        if digest.digest() not in self._digests:
            check()
            self._digests.add(digest.digest())


class _Lookup:
    """Shared objects by number, of the copier at work."""

    objects: ClassVar[list[Any]] = []

    @staticmethod
    def find(number: int) -> Any:
        return _Lookup.objects[number]


def explore(initial: S, copier: Copier, *, at_most: int = 500_000) -> Found:
    """Every state reachable from ``initial``. Raises Violation; also when there are more than ``at_most`` states."""
    found = Found()
    numbers = {initial.key(): 0}
    parents: list[tuple[int, Action | None]] = [(-1, None)]
    sources, targets = array("l"), array("l")  # edges of the actions without cost
    finals: set[int] = set()
    queue: deque[tuple[int, bytes]] = deque([(0, copier.dump(initial))])

    def path_to(number: int) -> list[Action]:
        path: list[Action] = []
        while number > 0:
            number, action = parents[number]
            assert action is not None
            path.append(action)
        return path[::-1]

    while queue:
        number, dumped = queue.popleft()
        state: S = copier.load(dumped)
        if state.is_final():
            finals.add(number)
            continue
        actions = list(state.enabled())
        for action in actions:
            successor: S = state if action is actions[-1] else copier.load(dumped)
            try:
                successor.apply(action)
                key = successor.key()
                if key not in numbers:
                    successor.check()
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1].name
                problem = f"{type(error).__name__} in {place}: {error}"
                raise Violation(problem, [*path_to(number), action]) from error
            found.transitions += 1
            name = getattr(action, "name", str(action))
            found.actions[name] = found.actions.get(name, 0) + 1
            target = numbers.setdefault(key, len(parents))
            if target == len(parents):
                parents.append((number, action))
                if len(parents) > at_most:
                    raise Violation(f"more than {at_most} states: without end, or too large", path_to(number))
                queue.append((target, copier.dump(successor)))
            if not action.cost:
                sources.append(number)
                targets.append(target)
    found.states = len(parents)
    for number in finals:
        action = parents[number][1]
        name = getattr(action, "name", "")
        found.finals[name] = found.finals.get(name, 0) + 1
    if stuck := _cannot_reach(finals, len(parents), sources, targets):
        raise Violation(f"{len(stuck)} states are stuck: no end can be reached; the first", path_to(min(stuck)))
    return found


def _cannot_reach(ends: set[int], states: int, sources: array[int], targets: array[int]) -> set[int]:
    """The states from which no edge leads to one of ``ends``."""
    before: list[list[int]] = [[] for _ in range(states)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    reached, todo = set(ends), list(ends)
    while todo:
        for source in before[todo.pop()]:
            if source not in reached:
                reached.add(source)
                todo.append(source)
    return set(range(states)) - reached


def _in_order(items: list[Any]) -> tuple[Any, ...]:
    """Return items that have no order in one that does not depend on their past; ``repr`` is slow."""
    return tuple(sorted(items, key=repr) if len(items) > 1 else items)


class Canonical:
    """Plain tuples that are equal for two values that behave alike. ``views``: by type, the parts that decide."""

    def __init__(self, views: Mapping[type, Callable[[Any], Any]]) -> None:
        self._views = views
        self._readers: dict[type, Callable[[Any], Sequence[Any]]] = {}

    def digest(self, value: Any) -> bytes:
        return hashlib.blake2b(marshal.dumps(self.of(value), 2), digest_size=16).digest()

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is array:
            return value.tobytes()
        if kind in (list, tuple, deque):
            return tuple([item if type(item) in _ATOMS else self.of(item) for item in value])
        if kind is Counter:
            value = {name: number for name, number in value.items() if number}
        if isinstance(value, dict):
            return _in_order([(self.of(k), self.of(v)) for k, v in value.items()])
        if isinstance(value, set | frozenset):
            return _in_order([self.of(item) for item in value])
        if kind in self._views:
            return self.of(self._views[kind](value))
        read = self._readers.get(kind) or self._readers.setdefault(kind, self._reader(value))
        return (kind.__name__, *[item if type(item) in _ATOMS else self.of(item) for item in read(value)])

    def _reader(self, value: Any) -> Callable[[Any], Sequence[Any]]:
        names = self._names(value)
        if not names:
            return lambda value: ()
        get = attrgetter(*names)
        return get if len(names) > 1 else lambda value: (get(value),)

    @staticmethod
    def _names(value: Any) -> list[str]:
        if is_dataclass(value):
            return [f.name for f in fields(value)]
        return list(getattr(value, "__struct_fields__", ()) or vars(value))
