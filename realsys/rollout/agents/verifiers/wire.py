"""Protocol of the environment server of verifiers 0.4: requests, and the assembly of a run's result. No I/O.

    to the server    [request id, method, msgpack]        methods: health, run, cancel
    from the server  [request id, "delta", msgpack]       changes of one trace, any number of them
                     [request id, "reply", msgpack]       the end: {success, error, head, traces}

A run has a trace for each agent of the environment that ran. Its rewards, metrics and errors come in deltas; the reply
names the traces that count. The messages of a trace are ignored: the gateway has the tokens.

`error-is-not-data`: a run with an error, a timeout or without any reward raises AgentError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realsys.errors import AgentError

Record = dict[str, Any]
_SHOWN = 500  # characters of an error


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run.

    reward   mean over the traces of trained agents; that of a trace is the sum of score times weight
    metrics  metrics and scores by name; after ``agent.`` if the environment has several agents
    ignored  ids of the traces whose tokens are not trained; model calls carry them in X-Session-ID
    """

    reward: float
    metrics: dict[str, float]
    ignored: frozenset[str] = frozenset()


def pack(payload: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode(dict(payload))


def unpack(data: bytes) -> Record:
    """Decode a message. Raises ValueError."""
    record = msgspec.msgpack.decode(data)
    if not isinstance(record, dict):
        raise ValueError(f"the environment server sent {type(record).__name__}: expected a map")
    return record


def client_of(kind: str, base_url: str, tokenizer: str, renderer: Mapping[str, Any] | None) -> Record:
    """Return the model client of a run. ``base_url`` names the episode, so there is no key.

    kind       ``chat``: messages go to the gateway; ``tokens``: verifiers renders them, and sends token ids
    tokenizer  folder with the tokenizer and chat template, for ``tokens``
    """
    # The name of a variable that is not set: the server takes keys from its environment only.
    client: Record = {"base_url": base_url, "api_key_var": "REALSYS_EPISODE_KEY"}
    if kind == "chat":
        return {**client, "type": "eval"}
    return {**client, "type": "train", "renderer_model_name": tokenizer, "renderer": renderer and dict(renderer)}


def run_request(task: Record, client: Record, model: str) -> bytes:
    """Return the payload of ``run``. The sampling settings are the gateway's."""
    return pack({"task_data": task, "client": client, "model": model, "sampling": {}})


@dataclass(slots=True)
class Assembly:
    """Traces of one run, from the deltas that have arrived."""

    traces: dict[str, Record] = field(default_factory=dict)

    def apply(self, delta: Record) -> None:
        """Add a change of a trace."""
        if delta.get("discard"):
            self.traces.pop(delta["trace"], None)
            return
        trace = self.traces.setdefault(delta["trace"], {"errors": []})
        trace["errors"] += delta.get("errors", [])
        trace.update(delta.get("set", {}))

    def outcome(self, reply: Record) -> Outcome:
        """Return the result of the run that this reply ends. Raises AgentError."""
        if not reply.get("success"):
            raise AgentError(f"the environment server: {_short(reply.get('error') or 'no cause given')}")
        head, ids = reply["head"], [summary["id"] for summary in reply["traces"]]
        if missing := [name for name in ids if name not in self.traces]:
            raise AgentError(f"the environment server sent no trace {missing[0]} of an episode")
        traces = {name: self.traces[name] for name in ids}
        if problem := _problem(head, list(traces.values())):
            raise AgentError(problem)
        trained = [trace for trace in traces.values() if _agent(trace).get("trainable", True)]
        ignored = frozenset(name for name, trace in traces.items() if not _agent(trace).get("trainable", True))
        return Outcome(_reward(trained), _metrics(list(traces.values())), ignored)


def _problem(head: Record, traces: list[Record]) -> str:
    """Return why the run has no result; "" if it has one. The head fails with each of its traces."""
    failed = [record for record in (*traces, head) if record.get("is_timeout") or not record.get("ok")]
    if not failed:
        return ""
    causes = [_last_error(record) or record.get("stop_condition") or "" for record in failed]
    verb = "timed out" if any(record.get("is_timeout") for record in failed) else "failed"
    return f"the environment {verb}: {next(filter(None, causes), 'no cause given')}"


def _last_error(record: Record) -> str:
    errors = record.get("errors") or []
    return _short(f"{errors[-1].get('type')}: {errors[-1].get('message')}") if errors else ""


def _agent(trace: Record) -> Record:
    agent: Record = trace.get("agent") or {}
    return agent


def _reward(trained: list[Record]) -> float:
    rewards = [trace["rewards"] for trace in trained if trace.get("rewards")]
    if not rewards:
        raise AgentError("the environment gave no reward: a task needs a function with @vf.reward")
    totals = [sum(one["score"] * one.get("weight", 1.0) for one in by_name.values()) for by_name in rewards]
    reward = sum(totals) / len(totals)
    if not math.isfinite(reward):
        raise AgentError(f"the environment gave the reward {reward}: it must be finite")
    return float(reward)


def _metrics(traces: list[Record]) -> dict[str, float]:
    """Return metrics and scores by name; means over the traces of an agent that ran several times."""
    names = {_agent(trace).get("name", "agent") for trace in traces}
    values: dict[str, list[float]] = {}
    for trace in traces:
        prefix = f"{_agent(trace).get('name', 'agent')}." if len(names) > 1 else ""
        scores = {name: reward["score"] for name, reward in (trace.get("rewards") or {}).items()}
        for name, value in {**scores, **(trace.get("metrics") or {})}.items():
            values.setdefault(f"{prefix}{name}", []).append(float(value))
    return {name: sum(own) / len(own) for name, own in values.items()}


def _short(text: str) -> str:
    return " ".join(str(text).split())[-_SHOWN:]
