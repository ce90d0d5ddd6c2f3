"""Sampling settings of one call, from those of the policy and of the request, and the tokens that are left. Pure.

policy's SamplingSpec ──(rollout.gateway.sampling=request: temperature, top_p, penalties of the agent)──┐
max_tokens, stop of the agent; room of the row, tokens left to the episode ──────────────────────────────┴> SamplingSpec
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.json import encode
from msgspec.structs import replace

from realsys.config.schema_rollout import RolloutConfig
from realsys.generation.client import SamplingSpec
from realsys.rollout.gateway.dialect import BadRequest, GatewayCall

log = logging.getLogger(__name__)

Mode = Literal["policy", "request"]

#: OpenAI's code for a prompt that leaves no room; agents shorten their history when they read it
TOO_LONG = "context_length_exceeded"
LIMIT = "episode_limit_reached"
#: text up to the end of a reasoning that the prompt has opened
_REASONING = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
#: settings that no mode takes from a request: seeds depend on the ticket only
_NEVER = frozenset({"sampling_seed"})
#: completions of one episode that are sampled at a time: no framework starts more together, but an endless loop does
MAX_IN_FLIGHT = 32
MOST_NOTED = 100  # bound on the combinations that are logged


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of one episode.

    row      tokens of prompt and completion that training accepts
    sampled  tokens that the episode may sample; 0: no bound
    """

    row: int
    turns: int
    in_flight: int
    sampled: int = 0

    @classmethod
    def of(cls, config: RolloutConfig, longest_row: int) -> CallLimits:
        """Return the bounds of the configuration."""
        sampled = config.gateway.max_sampled_tokens
        return cls(longest_row, config.agent_limits.max_turns, MAX_IN_FLIGHT, sampled)

    def admit(self, call: GatewayCall, turns: int, running: int, sampled: int) -> None:
        """Refuse a call beyond the bounds. ``running``: completions that are sampled now. Raises BadRequest."""
        if turns >= self.turns:
            problem = f"the episode has made its {self.turns} model calls (rollout.agent_limits.max_turns)"
            raise BadRequest(400, problem, code=LIMIT)
        if self.sampled and sampled >= self.sampled:
            raise self._used_up()
        if call.n > self.in_flight:
            raise BadRequest(400, f"must be at most {self.in_flight}", "n")
        if running + call.n > self.in_flight:
            problem = f"{running} completions of this episode are being sampled, and at most {self.in_flight} may be"
            raise BadRequest(429, problem, code="rate_limit_exceeded")

    def room(self, prompt: int, sampled: int, n: int = 1, reserved: int = 0) -> int:
        """Return the tokens that each of ``n`` completions may have after a prompt. Raises BadRequest for none.

        ``reserved``: tokens that running calls may still sample.
        """
        if prompt >= self.row:
            raise self.too_long(f"the request has {prompt} tokens")
        room = self.row - prompt
        if not self.sampled:
            return room
        share = (self.sampled - sampled - reserved) // n
        if share < 1:
            raise self._used_up(reserved)
        return min(room, share)

    def too_long(self, found: str) -> BadRequest:
        """Return the refusal of a prompt that leaves no room in a row."""
        problem = f"This model's maximum context length is {self.row} tokens, but {found}: shorten the messages"
        return BadRequest(400, problem, code=TOO_LONG)

    def _used_up(self, reserved: int = 0) -> BadRequest:
        """Return the refusal of a call that may sample no token. Running calls may leave some of ``reserved``."""
        bound = f"its {self.sampled} tokens (rollout.gateway.max_sampled_tokens)"
        if reserved:
            return BadRequest(429, f"running calls may sample the rest of {bound}", code="rate_limit_exceeded")
        return BadRequest(400, f"the episode has sampled {bound}", code=LIMIT)


def check_tokens(call: GatewayCall, vocabulary: int) -> None:
    """Raise BadRequest for a token id that the model does not have. An engine would count it as its own failure."""
    for name, ids in ((call.token_field, call.token_ids), ("stop_token_ids", call.stop_token_ids)):
        if ids and max(ids) >= vocabulary:
            raise BadRequest(400, f"has a token id outside of the vocabulary of {vocabulary} tokens", name)


def spec_of(call: GatewayCall, policy: SamplingSpec, mode: Mode, room: int, *, opened: bool = False) -> SamplingSpec:
    """Return the settings of each completion of ``call``. Raises BadRequest for a setting that is not allowed.

    ``opened``: the prompt ends inside of the reasoning, so a grammar begins after it.
    """
    most = min(policy.max_new_tokens, room, call.max_tokens or room)
    changes: dict[str, Any] = {} if mode == "policy" else _wishes(call)
    if most != policy.max_new_tokens:
        changes["max_new_tokens"] = most
    fewest = min(changes.get("min_new_tokens", policy.min_new_tokens), most)
    if fewest != policy.min_new_tokens:
        changes["min_new_tokens"] = fewest
    for name, own, wish in (
        ("stop", policy.stop, call.stop),
        ("stop_token_ids", policy.stop_token_ids, call.stop_token_ids),
    ):
        if wish:
            changes[name] = tuple(dict.fromkeys((*own, *wish)))
    if call.logprobs and call.top_logprobs:
        changes["top_logprobs_num"] = call.top_logprobs
    if call.grammar is not None:
        form = call.grammar[0]
        if opened:
            form = {"type": "sequence", "elements": [_REASONING, form]}
        changes["structural_tag"] = encode({"type": "structural_tag", "format": form}).decode()
    if not changes:
        return policy
    spec = replace(policy, **changes)
    if problem := spec.problem():
        name, _, rule = problem.removeprefix("sampling_params.").partition("=")
        raise BadRequest(400, rule, name)
    return spec


def ignored(call: GatewayCall, mode: Mode, grammars: bool) -> list[str]:
    """Return the settings without effect in mode request; in mode policy all are, and metrics record them.

    A grammar without effect is dropped: the engine has none (``grammars``), or the model may call tools instead.
    """
    names = ["seed"] if mode == "request" and "sampling_seed" in call.sampling else []
    if call.grammar is not None and (not grammars or (call.tools and call.parse_tools)):
        names.append(call.grammar[1])
        call.grammar = None
    return names


def _wishes(call: GatewayCall) -> dict[str, Any]:
    wishes: dict[str, Any] = {name: value for name, value in call.sampling.items() if name not in _NEVER}
    if wishes.get("top_k") == 0:  # off, as vLLM writes it
        wishes["top_k"] = -1
    return wishes


class Wishes:
    """Sampling settings that agents ask for, and fields without effect; each new one is logged once."""

    def __init__(self) -> None:
        self._noted: set[tuple[tuple[str, float], ...]] = set()
        self._ignored: set[str] = set()

    def note(self, call: GatewayCall, mode: Mode) -> dict[str, float]:
        """Return the settings of ``call`` as metrics of its episode."""
        asked = {name: value for name, value in call.sampling.items() if isinstance(value, (int, float))}
        if not asked:
            return {}
        combination = tuple(sorted(asked.items()))
        if combination not in self._noted and len(self._noted) < MOST_NOTED:
            self._noted.add(combination)
            text = ", ".join(f"{name}={value:g}" for name, value in combination)
            used = "used" if mode == "request" else "replaced by those of the trial"
            log.info("an agent asks for %s: %s (rollout.gateway.sampling=%s)", text, used, mode)
        return {f"gateway/asked_{name}": float(value) for name, value in asked.items()}

    def note_ignored(self, names: Iterable[str]) -> None:
        """Log a field without effect the first time that an agent sends it."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < MOST_NOTED:
                self._ignored.add(name)
                log.warning("an agent sends %.100r, which has no effect: its completions are sampled without it", name)
