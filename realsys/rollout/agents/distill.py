"""The agent ``distill``: a completion whose tokens a teacher scores (on-policy distillation, arXiv 2306.13649).

    single_turn ──row──> teacher of the prompt's row: log-probs of exactly these tokens ──> Row.rewards, Row.teacher
                            └─ Trouble ──┬─ busy, unreachable, too late, status 5xx: again, for at most ``outage_s``
                                         ├─ this completion has no scores: RewardError
                                         └─ the teacher has never had any, or not for long: StuckError

Reward of a loss token: log p_teacher - log p_sampled, whose mean over samples is -KL(student || teacher). With
``train.ppo.turn_rewards`` and gamma 0 it is the token's advantage (``algorithm=distill_endpoint``). If the loss reads a
teacher's top k (``algorithm=distill_topk_endpoint``), the row also has these at each loss token.

`error-is-not-data`: a token has a reward only if the teacher sent its log-prob, and its text if it sends texts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from pydantic import Field

from realsys.algorithm.kl import MAX_LOG_RATIO
from realsys.cluster.http_client import CallFailed, HttpClient, attempts
from realsys.cluster.stream.codec import LOGPROB_SLACK
from realsys.config.dataflow import TEACHER_TOKENS, dataflow_of
from realsys.config.fields import Name, NonNegativeFloat, Positive, PositiveFloat, Section, arguments_of
from realsys.config.schema import Config
from realsys.config.trial_sizes import longest_sequence
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import MALFORMED, ConfigError, DataError, RealsysError, RewardError, StuckError
from realsys.reward.llm_judge import trouble_of
from realsys.reward.pool import HOPELESS
from realsys.reward.rubric import check_address, check_key
from realsys.reward.verifier_protocol import ENDPOINT
from realsys.rollout.agents.contract import AgentParts, Session
from realsys.rollout.agents.single_turn import SingleTurn
from realsys.rollout.environments import Task
from realsys.types import F32, I32, Episode

log = logging.getLogger(__name__)

KEY = "teacher"  # key of a dataset row that names its teacher
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 10.0  # pauses of a teacher that is away
_GENERATE = "/generate"  # SGLang's own route
_REPLY_BYTES = 1 << 20, 1 << 10  # that a reply may have, and further ones for each token
_FIELD = "rollout.agent_args"


class DistillArguments(Section):
    """Arguments of the agent (docs/agents.md has a table of them)."""

    teachers: dict[Name, str] = Field(min_length=1, description="name -> address, with its /v1, or SGLang's /generate")
    models: dict[Name, str] = Field({}, description="name of a teacher -> name of the model at its endpoint")
    api_key_env: str = Field(
        "", description="environment variable with the key of the endpoints; empty: they need none"
    )
    timeout_s: PositiveFloat = Field(120.0, description="time of one request")
    outage_s: NonNegativeFloat = Field(600.0, description="time for which a teacher may be away or busy")
    concurrency: Positive = Field(32, description="requests to a teacher at a time, of one RolloutWorker")


class Distill(SingleTurn):
    """Agent with one completion per episode; the rewards are those of its tokens, the verdict says if it is correct."""

    def __init__(self, parts: AgentParts, **arguments: Any) -> None:
        """Read arguments and key. Raises ConfigError."""
        super().__init__(parts)
        self.check(parts.config, parts.tokenizer, **arguments)
        given = arguments_of(DistillArguments, arguments, _FIELD)
        longest, ppo = longest_sequence(parts.config), parts.config.train.ppo
        self._rewards = ppo.turn_gamma is not None
        top_k = ppo.top_k if TEACHER_TOKENS in dataflow_of(parts.config).source_keys else 0
        self._teachers = {name: Teacher(name, given, parts.tokenizer, longest, top_k) for name in given.teachers}

    @staticmethod
    def longest_row(config: Config, **arguments: Any) -> int:
        """Return the tokens of the longest prompt with the longest completion. Raises ConfigError."""
        arguments_of(DistillArguments, arguments, _FIELD)
        return SingleTurn.longest_row(config)

    @staticmethod
    def check(config: Config, tokenizer: TextTokenizer, **arguments: Any) -> None:
        """Check addresses, key and the settings that make use of the rewards. Raises ConfigError."""
        given = arguments_of(DistillArguments, arguments, _FIELD)
        for name, url in given.teachers.items():
            check_address(url, f"{_FIELD}.teachers.{name}")
        if unknown := sorted(given.models.keys() - given.teachers.keys()):
            raise ConfigError(f"{_FIELD}.models", unknown[0], "is not the name of a teacher")
        check_key(given.api_key_env, f"{_FIELD}.api_key_env")
        if config.train.ppo.turn_gamma is None and not config.train.ppo.top_k:
            problem = "must be true to train the rewards of tokens: set algorithm=distill_endpoint"
            raise ConfigError("train.ppo.turn_rewards", False, problem)
        if (temperature := config.generation.sampling.temperature) != 1.0:
            raise ConfigError("generation.sampling.temperature", temperature, "must be 1: teachers score at 1")

    async def run(self, task: Task, session: Session) -> Episode:
        """Play as ``single_turn`` does; let the teacher score a completion to train on.

        Raises RewardError or StuckError without its scores, DataError if the row names no teacher.
        """
        if task.ticket.kind != "train":
            return await super().run(task, session)
        teacher = self._teacher_of(task)
        episode = await super().run(task, session)
        episode.reward = 0.0  # the verdict's would be added to the reward of the last token
        row = episode.rows[0]
        if places := np.flatnonzero(row.loss_mask).tolist():
            begin = time.perf_counter()
            scores, row.teacher = await teacher.score(row.tokens.tolist(), places[0])
            gains = np.clip(scores - row.logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            if self._rewards:
                row.rewards = tuple(zip(places, gains.tolist(), strict=True))
            episode.metrics["teacher_seconds"] = time.perf_counter() - begin
            for name in ("teacher_kl", *([f"teacher_kl/{teacher.name}"] if len(self._teachers) > 1 else [])):
                episode.metrics[name] = -float(gains.mean())
        return episode

    async def close(self) -> None:
        """Close the connections."""
        for teacher in self._teachers.values():
            await teacher.close()

    def _teacher_of(self, task: Task) -> Teacher:
        named = task.prompt.extra.get(KEY, next(iter(self._teachers)) if len(self._teachers) == 1 else None)
        if isinstance(named, str) and named in self._teachers:
            return self._teachers[named]
        row = f"prompt {task.ticket.prompt_index} of {task.ticket.split}"
        problem = "has no key" if KEY not in task.prompt.extra else f"has {named!r} under the key"
        raise DataError(f"{row} {problem} {KEY!r}: it must be one of {', '.join(self._teachers)} ({_FIELD}.teachers)")


class Teacher:
    """A teacher behind an endpoint."""

    def __init__(
        self, name: str, given: DistillArguments, tokenizer: TextTokenizer, longest: int, top_k: int = 0
    ) -> None:
        """``longest``: tokens of the longest row; ``top_k``: most probable tokens to ask for at each loss token."""
        self.name = name
        self._top_k = top_k
        url = given.teachers[name].rstrip("/")
        self._native = url.endswith(_GENERATE)
        self._url = url if self._native else f"{url}/completions"
        self._model = given.models.get(name, "")
        self._given = given
        self._tokenizer = tokenizer
        self._key = os.environ[given.api_key_env].strip() if given.api_key_env else ""
        most, per_token = _REPLY_BYTES
        self._client = HttpClient(key=self._key, max_reply=most + per_token * longest * (4 + top_k) // 4)
        self._places = asyncio.Semaphore(given.concurrency)
        self._answered = False  # it has sent scores: another refusal may be the completion's fault
        self._is_away = False
        self._failed = 0  # completions without scores since the last one with them

    async def score(self, tokens: list[int], begin: int) -> tuple[F32, tuple[I32, F32] | None]:
        """Return the teacher's log-probs of ``tokens[begin:]``, each after all tokens before it; ``begin`` above 0.

        With ``top_k`` also its most probable tokens at each of them and their log-probs, as ``Row.teacher``, else None.
        Raises RewardError if it sends none, StuckError if it will never send any.
        """
        problem, fatal = "no answer", False
        async with self._places:
            async for _ in attempts(self._given.outage_s, FIRST_DELAY_S, LAST_DELAY_S):
                try:
                    body = await self._client.call(self._url, self._body(tokens, begin), self._given.timeout_s)
                    # Beside the event loop: a long row has a million log-probs.
                    scores, top = await asyncio.to_thread(self._read, body, tokens, begin)
                except CallFailed as failed:
                    trouble = trouble_of(failed)
                    problem, fatal = str(trouble), trouble.fatal
                    if not trouble.again:
                        break
                    if not self._is_away:
                        log.warning("%s", self._described(problem))
                    self._is_away = True
                except ValueError as error:
                    problem = str(error)
                    break
                else:
                    self._check_texts(tokens[begin:], [text for _, text in scores])
                    self._answered, self._is_away, self._failed = True, False, 0
                    return np.array([value for value, _ in scores], np.float32), top
        raise self._error(problem, fatal=fatal)

    async def close(self) -> None:
        """Close the connections; requests under way fail."""
        await self._client.close()

    def _body(self, tokens: list[int], begin: int) -> dict[str, Any]:
        if self._native:
            # SGLang leaves out the first score of those that it returns.
            asked = {"return_logprob": True, "logprob_start_len": begin - 1, "return_text_in_logprobs": True}
            asked |= {"top_logprobs_num": self._top_k} if self._top_k else {}
            return {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **asked}
        model = {"model": self._model} if self._model else {}
        return {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": self._top_k, **model}

    def _read(
        self, body: bytes, tokens: list[int], begin: int
    ) -> tuple[list[tuple[float, str | None]], tuple[I32, F32] | None]:
        scores = read_scores(body, tokens, begin, native=self._native)
        return scores, read_top(body, len(scores), self._top_k, native=self._native) if self._top_k else None

    def _check_texts(self, tokens: Sequence[int], texts: Sequence[str | None]) -> None:
        """Raise StuckError if a token has another text at the teacher: then its scores are those of other texts."""
        for token, text in zip(tokens, texts, strict=True):
            own = self._tokenizer.decode([token]).strip()
            # a part of a character has no text of its own
            if text is not None and own != text.strip() and "\ufffd" not in own + text and own and text.strip():
                problem = f"another vocabulary: token {token} is {text!r} there, and {own!r} in the student's"
                raise StuckError(self._described(f"{problem}: use a teacher with the student's tokenizer"))

    def _error(self, problem: str, *, fatal: bool) -> RealsysError:
        self._failed += 1
        described = self._described(problem)
        if fatal or not self._answered:
            return StuckError(f"{described}: correct {_FIELD}, or the endpoint")
        if self._failed >= HOPELESS:
            return StuckError(f"{self._failed} completions in a row had no scores; the last one: {described}")
        return RewardError(described, ENDPOINT)

    def _described(self, problem: str) -> str:
        hidden = problem.replace(self._key, "***") if self._key else problem
        return f"teacher {self.name} ({self._url}): {hidden}"


# ---- reading what a teacher sent. Pure


class _Scored(msgspec.Struct):
    logprob: float | None
    decoded_token: str | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Scored] | None]  # for each token of the prompt; its own score, and others


class _Completed(msgspec.Struct):
    choices: list[_Choice]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]
    input_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] = []


class _Generated(msgspec.Struct):
    meta_info: _Meta


#: log-prob, id and text of a token, as a teacher gives them
_Entry = tuple[float | None, int, str | None]


def read_scores(body: bytes, tokens: Sequence[int], begin: int, *, native: bool) -> list[tuple[float, str | None]]:
    """Return log-prob and text of each of ``tokens[begin:]``; a text is None if the teacher sends none.

    ``native``: the reply of SGLang's own route. Raises ValueError for anything but one log-prob of each of them.
    """
    sent = tokens[begin:]
    try:
        entries = _of_generate(body) if native else _of_completions(body, tokens)
    except MALFORMED as error:
        raise ValueError(f"the reply has no scores of the prompt: {error}") from None
    if len(entries) < len(sent):
        raise ValueError(f"it sent scores of {len(entries)} tokens, and was asked about {len(sent)}")
    found = list[tuple[float, str | None]]()
    for token, (value, given, text) in zip(sent, entries[-len(sent) :], strict=True):
        if given not in (token, 0):  # SGLang calls the last token of its vocabulary 0
            raise ValueError(f"it sent the score of token {given} at the place of token {token}")
        if value is None or not math.isfinite(value) or value > LOGPROB_SLACK:
            raise ValueError(f"the log-prob of token {token} is {value}: it must be a finite number, and at most 0")
        found.append((value, text if given == token else None))
    return found


def read_top(body: bytes, count: int, k: int, *, native: bool) -> tuple[I32, F32]:
    """Return the k most probable tokens, and their log-probs, at each of the last ``count`` tokens of a reply.

    Arrays [count, k], the most probable token first. Raises ValueError if there are not as many.
    """
    if native:
        places = msgspec.json.decode(body, type=_Generated).meta_info.input_top_logprobs
        sent = [[(value, token) for value, token, _ in at or ()] for at in places]
    else:
        choices = msgspec.json.decode(body, type=_Completed).choices
        sent = [[(scored.logprob, token) for token, scored in (at or {}).items()] for at in choices[0].prompt_logprobs]
    sent = sent[-count:] if len(sent) >= count else [[]]
    if (fewest := min(map(len, sent))) < k:
        field = "input_top_logprobs" if native else "prompt_logprobs"
        problem = f"{field} has {fewest} tokens at a place, and train.ppo.loss_args.top_k asks for {k}"
        raise ValueError(f"{problem}: lower it, or let the endpoint send as many (vLLM: --max-logprobs)")
    if not all(value is not None and math.isfinite(value) for at in sent for value, _ in at):
        raise ValueError("a log-prob of its most probable tokens is not a finite number")
    best = np.array([sorted(at, reverse=True)[:k] for at in sent], np.float64)
    return best[:, :, 1].astype(np.int32), best[:, :, 0].astype(np.float32)


def _of_generate(body: bytes) -> list[_Entry]:
    return msgspec.json.decode(body, type=_Generated).meta_info.input_token_logprobs


def _of_completions(body: bytes, tokens: Sequence[int]) -> list[_Entry]:
    choices = msgspec.json.decode(body, type=_Completed).choices
    by_place = choices[0].prompt_logprobs if choices else []
    if len(by_place) != len(tokens):
        raise ValueError(f"it sent scores of {len(by_place)} tokens, and was asked about {len(tokens)}")
    own = [(at or {}).get(token, _Scored(None)) for token, at in zip(tokens, by_place, strict=True)]
    return [(scored.logprob, token, scored.decoded_token) for token, scored in zip(tokens, own, strict=True)]
