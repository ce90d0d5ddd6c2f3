"""The training loop in the hands of a script: `realsys.Session`.

    for step in session.steps():
        batch = session.rollout.prepare_batch()
        session.actor.logprobs(batch)
        session.actor.train(batch)
        session.publish()

The script has the metadata of a batch; its tensors stay on the ranks. Each method returns when its work is done;
``session.aio`` has the same methods as coroutines. A script runs in a thread of the MasterWorker
(`train.loop=mine.py`), or in a process of its own that is connected to it (``realsys.Session([...])``,
``realsys.api``). Either way the ledger, the staleness bound and recovery hold: after a failure the script begins again,
and ``steps`` with the step after the last checkpoint.

Numbers of rows refer to the order of the batch. No torch, and nothing of the run is imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from realsys.agent_runner.contract import described
from realsys.config.schema import Config
from realsys.errors import ConfigError, RealsysError, ScriptError, TooFewGroups
from realsys.types import ARRAY_KEYS, SampleMeta

# ---- what goes between a script and the MasterWorker


class BatchInfo(msgspec.Struct):
    """A batch. ``version``: the last one that was trained when it was claimed."""

    number: int
    version: int
    samples: list[SampleMeta]


class ScriptCall(msgspec.Struct):
    """A call on the model of ``role``. ``settings``: fields of ``train.ppo`` with other values for this call."""

    role: str
    what: str
    settings: dict[str, Any] = {}
    lr: float | None = None
    allow_stale: bool = False


class Submitted(msgspec.Struct):
    """Rows that the script has submitted in this trial: of all of them ``queued`` wait to be granted, ``open`` are
    rolled out, the others have ended or wait to be trained.
    """

    total: int
    queued: int
    open: int


class RowArrays(msgspec.Struct):
    """Text of a row, and its arrays by key."""

    sample_id: str
    text: str
    arrays: dict[str, list[int | float | bool]]


class SessionAddress(msgspec.Struct):
    """Content of session.json: where the MasterWorker ``incarnation`` hears the script."""

    url: str
    incarnation: str


class CallRequest(msgspec.Struct):
    """POST /call. The same ``number`` again asks for the result of the same call."""

    number: int
    method: str
    args: list[Any]


class CallReply(msgspec.Struct):
    """``done`` False: ask again. ``error``: class of ``realsys.errors`` that the call raised, with its ``message``."""

    done: bool = False
    result: Any = None
    error: str = ""
    message: str = ""


#: calls of a script -> type of the result
CALLS: dict[str, Any] = {
    **dict.fromkeys(("next_step", "publish", "pin"), int),
    "prepare": BatchInfo | None,
    "select": BatchInfo,
    "submit": Submitted,
    "rows": list[RowArrays],
    "evaluate": dict[str, float | None],
    **dict.fromkeys(("update", "call"), dict[str, dict[str, float]]),
    **dict.fromkeys(("drop", "evaluate_due", "save", "export", "log", "unpin"), None),
}
FINISH = "finish"  #: the script has ended

#: Carries out a method of ``realsys.train.master.session.MasterSession``: its name and its arguments -> its result
Call = Callable[..., Any]
Stats = dict[str, float]
_ROWS = 64  # rows of one call: they are held in memory several times
_TOP_UP_S = 2.0  # between two looks whether rows of the data are needed while a batch is awaited


# ---- batches


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a batch with its content.

    text       of all tokens, special ones included
    tokens     int32 [T]
    loss_mask  bool [T]; True where the policy sampled the token and it is trained
    arrays     key -> the arrays that were asked for, one number for each loss token: docs/session.md has the keys
    meta       its metadata
    """

    text: str
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    arrays: dict[str, npt.NDArray[Any]]
    meta: SampleMeta


class Batch:
    """Rows that the ranks hold. ``samples``: their metadata, group by group."""

    def __init__(self, call: Call, info: BatchInfo) -> None:
        self._call = call
        self._info = info
        self.samples = info.samples

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows, {len(self.groups)} groups, prepared at version {self._info.version})"

    @property
    def number(self) -> int:
        """Number of the batch in its session."""
        return self._info.number

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Rewards of the episodes, one for each row: float64 [rows]."""
        return np.array([sample.reward for sample in self.samples], np.float64)

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """Versions of the oldest tokens, one for each row: int64 [rows]."""
        return np.array([sample.version_min for sample in self.samples], np.int64)

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the rows of each group, which answer the same prompt."""
        found: dict[str, list[int]] = {}
        for number, sample in enumerate(self.samples):
            found.setdefault(sample.ticket_id, []).append(number)
        return list(found.values())

    def rows(self, keys: Sequence[str] = (), *, only: Sequence[int] | None = None) -> list[Row]:
        """Fetch texts and tokens from the ranks, and with ``keys`` further arrays.

        ``keys``: ``behav_logprobs``, ``versions``, and what the calls on this batch have made. ``only``: numbers of
        rows. Raises ConfigError for an unknown key.
        """
        chosen = [self.samples[number] for number in (range(len(self)) if only is None else only)]
        ids = [sample.sample_id for sample in chosen]
        parts = (ids[begin : begin + _ROWS] for begin in range(0, len(ids), _ROWS))
        found = [row for part in parts for row in self._call("rows", self.number, part, list(keys))]

        def array(key: str, values: list[Any]) -> npt.NDArray[Any]:
            return np.array(values, ARRAY_KEYS[key][0])

        return [
            Row(
                row.text,
                array("tokens", row.arrays["tokens"]),
                array("loss_mask", row.arrays["loss_mask"]),
                {key: array(key, row.arrays[key]) for key in keys},
                meta,
            )
            for row, meta in zip(found, chosen, strict=True)
        ]

    def select(self, rows: Sequence[int] | None = None, *, rewards: Sequence[float] | None = None) -> Batch:
        """Return a part of this batch, by the numbers of its rows, and with ``rewards`` other ones (one for each row).

        Nothing is copied: what a call makes for one of the two is there for both. Training the part trains the tickets
        of the batch: a group of which no row is trained does not come again.
        """
        ids = [self.samples[number].sample_id for number in (range(len(self)) if rows is None else rows)]
        given = [] if rewards is None else [float(value) for value in rewards]
        if given and len(given) != len(ids):
            raise ConfigError("rewards", len(given), f"must be one for each of the {len(ids)} rows")
        return Batch(self._call, self._call("select", self.number, ids, given))

    def drop(self, reason: str) -> None:
        """Give the batch up: its tickets end, and others take their places. ``reason`` is counted in the ledger."""
        self._call("drop", self.number, reason)


# ---- models and rollouts


class Role:
    """A model on the ranks: ``session.actor``, ``.ref``, ``.critic``, ``.reward``, or any role of the dataflow."""

    def __init__(self, call: Call, name: str) -> None:
        self._call = call
        self._name = name

    def __repr__(self) -> str:
        return f"Role({self._name!r})"

    def logprobs(self, batch: Batch) -> Stats:
        """Compute the log-probs of the loss tokens: of the actor ``prox_logprobs``, of other roles ``ref_logprobs``."""
        return self._run(batch, ScriptCall(self._name, "logprobs"))

    def values(self, batch: Batch) -> Stats:
        """Compute the values of the loss tokens (``values``), with a value head."""
        return self._run(batch, ScriptCall(self._name, "values"))

    def scores(self, batch: Batch) -> Stats:
        """Compute a score of each row, which is added to its reward times ``train.ppo.reward_model_weight``."""
        return self._run(batch, ScriptCall(self._name, "scores"))

    def train(
        self,
        batch: Batch,
        *,
        loss: str | Callable[..., Any] | None = None,
        lr: float | None = None,
        allow_stale: bool = False,
        **settings: Any,
    ) -> Stats:
        """Train on a batch, in ``minibatches`` optimizer steps; return the statistics of the call.

        ``loss``: a name of ``train.ppo.loss``, or a function of a file: the ranks import it. ``lr``: instead of the
        schedule of the configuration. ``settings``: other values for fields of ``train.ppo`` in this call. Raises
        StaleBatch for a batch that was kept for too long, unless ``allow_stale``; ConfigError.
        """
        if loss is not None:
            settings["loss"] = loss if isinstance(loss, str) else name_of(loss)
        return self._run(batch, ScriptCall(self._name, "train", settings, lr, allow_stale))

    def _run(self, batch: Batch, call: ScriptCall) -> Stats:
        stats: Stats = next(iter(self._call("call", batch.number, [call]).values()))
        return stats


def name_of(function: Callable[..., Any]) -> str:
    """Return the name by which other processes import a function. Raises ConfigError if they cannot."""
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    problem = "must be a function at the top of a file: other processes import it"
    if module is None or not name.isidentifier():
        raise ConfigError("loss", name or repr(function), problem)
    if module.__name__ != "__main__" and not module.__name__.endswith(".py"):
        return f"{module.__name__}:{name}"
    if (file := getattr(module, "__file__", None)) is None:
        raise ConfigError("loss", name, problem)
    return f"{Path(file).resolve()}:{name}"


class Rollout:
    """The agents: groups of episodes, sampled all the time, within the staleness bound."""

    def __init__(self, call: Call, batch_groups: int) -> None:
        self._call = call
        self._batch_groups = batch_groups
        self._data: Iterable[Any] | None = None
        self._rows: Iterator[Any] = iter(())
        self._taken = 0  # rows of the data so far
        self._last: list[Any] = []  # the last of them

    def prepare_batch(self, data: Iterable[Any] | None = None, agent: str = "") -> Batch | None:
        """Wait for ``train.batch_groups`` groups, the oldest first; None if the prompts, or ``data``, are used up.

        ``data``: rows as for ``submit``, which are submitted as they are needed (``data.order=script``). Call it with
        the same object each time. It must begin with the same rows whenever the script begins again: those that were
        submitted before are passed over. Raises StuckError if no group can come any more, Stopped.
        """
        if data is None:
            info = self._call("prepare", 0, 0.0)
            return None if info is None else Batch(self._call, info)
        if self._data is not data:
            self._taken, self._last = self.submitted, []
            self._data, self._rows = data, itertools.islice(iter(data), self._taken, None)
        while True:
            left = self._top_up(agent)
            with contextlib.suppress(TooFewGroups):
                return Batch(self._call, self._call("prepare", 0, _TOP_UP_S))
            if not left:
                return None

    def _top_up(self, agent: str) -> bool:
        """Submit rows of the data until two batches are queued; False if none is left, queued or rolled out."""
        known: Submitted = self._call("submit", [])
        unsubmitted = max(0, self._taken - known.total)  # a call before may have failed
        self._last = self._last[len(self._last) - unsubmitted :]
        more = list(itertools.islice(self._rows, max(0, 2 * self._batch_groups - known.queued - unsubmitted)))
        self._last += more
        self._taken += len(more)
        if self._last:
            self.submit_all(self._last, agent)
        return bool(self._last) or known.queued > 0 or known.open > 0

    @property
    def submitted(self) -> int:
        """Rows that were ever submitted in this trial, also before a recovery: a script goes on with the next one."""
        known: Submitted = self._call("submit", [])
        return known.total

    def submit(self, row: int | Mapping[str, Any], agent: str = "") -> int:
        """Submit a row to be rolled out, after those before it; return the number of rows ever submitted.

        ``row``: number of a prompt of ``data.train``, or a new row in its layout (``prompt``, ``answer``, ...).
        ``agent``: a name for ``rollout.agent`` that plays this row alone. Needs ``data.order=script``. What is
        submitted is trained or dropped once, whatever is killed. Raises DataError, ConfigError.
        """
        return self.submit_all([row], agent)

    def submit_all(self, rows: Sequence[int | Mapping[str, Any]], agent: str = "") -> int:
        """Submit rows; return the number of rows ever submitted. Raises as ``submit``: then none of them is."""
        known: Submitted = self._call("submit", [(row if isinstance(row, int) else dict(row), agent) for row in rows])
        return known.total

    def wait(self, groups: int, timeout: float = 0.0) -> Batch | None:
        """Wait for ``groups`` groups, for ``timeout`` seconds (0: as long as groups can come); None if the prompts are
        used up. Raises TooFewGroups; the groups that have arrived by then are kept for the next call.
        """
        if groups < 1:
            raise ConfigError("groups", groups, "must be at least 1")
        info = self._call("prepare", groups, float(timeout))
        return None if info is None else Batch(self._call, info)


# ---- session


class Session:
    """The calls of a training loop. A script gets one; ``realsys.Session`` starts a trial and is one."""

    def __init__(self, call: Call, config: Config, folder: Path) -> None:
        """``folder``: of the trial."""
        self._call = call
        self.config = config
        self.folder = folder
        self.rollout = Rollout(call, config.train.batch_groups)

    def __getattr__(self, name: str) -> Role:
        """Return the model of a role."""
        roles = self.__dict__["config"].roles if "config" in self.__dict__ else ()
        if name.startswith("_") or name not in ("actor", *roles):
            raise AttributeError(f"a session has no {name!r}: roles are {', '.join(('actor', *roles))}")
        return Role(self._call, name)

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps, from the one after the last checkpoint until ``train.total_steps``, epochs or
        time are used up. Each ends with ``publish``.
        """
        while step := self._call("next_step"):
            yield step

    def update(self, batch: Batch) -> dict[str, Stats]:
        """Run all calls of ``train.ppo.algorithm``; return call -> statistics. Calls on different ranks overlap."""
        stats: dict[str, Stats] = self._call("update", batch.number)
        return stats

    def compute(self, batch: Batch, *calls: str) -> dict[str, Stats]:
        """Run calls at the same time: ``session.compute(batch, "ref.logprobs", "critic.values")``."""
        named = [ScriptCall(*call.partition(".")[::2]) for call in calls]
        stats: dict[str, Stats] = self._call("call", batch.number, named)
        return stats

    def advantages(self, batch: Batch, **settings: Any) -> Stats:
        """Compute the advantages of the tokens (``advantages``, with values also ``returns``), by ``train.ppo``.

        Without this call all tokens of an episode have the same advantage. ``settings``: as in ``Role.train``.
        """
        stats: Stats = next(
            iter(self._call("call", batch.number, [ScriptCall("actor", "advantages", settings)]).values())
        )
        return stats

    def publish(self) -> int:
        """End the step: generation gets the weights, the ledger learns what was trained, a due checkpoint is taken.

        Returns the new version, which is the number of the step. The servers load it while the script goes on.
        """
        version: int = self._call("publish")
        return version

    def evaluate_due(self) -> None:
        """Request the evaluations that ``evaluation.every_steps`` wants after this step, without a wait."""
        self._call("evaluate_due")

    def evaluate(self, name: str) -> dict[str, float | None]:
        """Evaluate the newest version on all held-out sets, and wait; return set -> accuracy.

        ``name``: of the record in the step log.
        """
        accuracy: dict[str, float | None] = self._call("evaluate", name)
        return accuracy

    def save(self) -> None:
        """Take a checkpoint of the last published version now; ``publish`` takes those that are due."""
        self._call("save")

    def export(self, folder: str | Path) -> None:
        """Write the newest version as a Hugging Face folder, which must not exist."""
        self._call("export", str(Path(folder).absolute()))

    def pin(self, name: str) -> int:
        """Keep the newest version on a server under ``name``, for agents that play against it; return the version.

        ``name`` again moves it to the newest version. Agents ask for it by ``session.generate(..., policy=name)``, or
        by the ``model`` of a request. Raises ConfigError, for instance with fewer than two servers.
        """
        version: int = self._call("pin", name)
        return version

    def unpin(self, name: str) -> None:
        """Let the servers of a pinned version follow the others again."""
        self._call("unpin", name)

    def log(self, **numbers: float) -> None:
        """Add numbers to this step's record in the step log: trackers get them as ``script/NAME``."""
        self._call("log", {name: float(value) for name, value in numbers.items()})

    @property
    def aio(self) -> Any:
        """The same session with coroutines: ``async for step in session.aio.steps()``, ``await ....publish()``."""
        return AsyncForm(self)


def run_script(function: Callable[[Any], Any], session: Session, name: str) -> None:
    """Run a training loop, plain or a coroutine function. Raises ScriptError, with its place, for what it raises."""
    try:
        if inspect.iscoroutinefunction(function):
            asyncio.run(function(session.aio))
        else:
            function(session)
    except RealsysError:
        raise
    except Exception as error:
        failed = described(error)
        raise ScriptError(f"{name}: {failed['type']}: {failed['message']} ({failed['place']})") from error


class AsyncForm:
    """An object of a session whose methods are coroutines. Objects that they return are of this form, too."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __len__(self) -> int:
        return len(self._plain)

    def __repr__(self) -> str:
        return repr(self._plain)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._plain, name)
        if not inspect.ismethod(value):
            return _async_form(value)

        def begun(*args: Any, **kwargs: Any) -> Any:
            plain = [arg._plain if isinstance(arg, AsyncForm) else arg for arg in args]
            if inspect.isgeneratorfunction(value):
                return _async_items(value(*plain, **kwargs))
            return _awaited(functools.partial(value, *plain, **kwargs))

        return begun

    async def __aenter__(self) -> Any:
        return _async_form(await asyncio.to_thread(self._plain.__enter__))

    async def __aexit__(self, *error: Any) -> Any:
        return await asyncio.to_thread(self._plain.__exit__, *error)


def _async_form(value: Any) -> Any:
    return AsyncForm(value) if isinstance(value, Session | Rollout | Role | Batch) else value


async def _awaited(work: Callable[[], Any]) -> Any:
    return _async_form(await asyncio.to_thread(work))


async def _async_items(items: Iterator[Any]) -> AsyncIterator[Any]:
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item
