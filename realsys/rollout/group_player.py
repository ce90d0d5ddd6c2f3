"""Concurrent episodes of a ticket, and what becomes of their group.

    ticket ──> n episodes ──> agent.run(task, session) ──generate──> EpisodeSession
                   └─ Episode, or an error of this episode ──> Played: enough episodes for a group, or the first error

With ``rollout.oversample`` more episodes start than a group needs. The first that end make the group, whatever their
rewards; the others are cancelled, and their tokens are counted. ``reason_to_drop`` then says whether the group is
trained, and ``kept_episodes`` with which of its episodes.

An episode without a verdict leaves the loss (`error-is-not-data`). It counts as played: the group is trained with the
others, and nothing is generated again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from realsys.agent_runner.contract import described
from realsys.algorithm.token_losses import FAILED, NOT_IN_ROWS, NOT_KEPT, OVER_SAMPLED
from realsys.cluster.aio import in_thread
from realsys.config.doors import FILTER
from realsys.config.evaluation_sets import evaluation_sets
from realsys.config.schema import Config, SamplingConfig
from realsys.config.schema_rollout import KeepConfig
from realsys.config.schema_train import FilterConfig
from realsys.data.prompts import Prompt
from realsys.errors import AgentError, RealsysError, RewardError, StuckError
from realsys.generation.client import SamplingSpec
from realsys.manager.client import RolloutSuperseded
from realsys.manager.ledger.tickets import label
from realsys.observe.spans import span
from realsys.rollout.agents.contract import Agent
from realsys.rollout.environments import Task
from realsys.rollout.episode_session import Calls, CompletionEngine, EpisodeSession
from realsys.rollout.episodes import check_episode, kept_episodes, reason_to_drop
from realsys.rollout.gateway.gateway import Gateway
from realsys.rollout.stores import DroppedStore
from realsys.types import Episode, Ticket

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Played:
    """The episodes of a ticket that succeeded, in order, and one line for each that failed.

    episodes  to be trained; none if the group is dropped
    unused    the others that ended
    dropped   why the group is not worth training on; "": it is
    """

    episodes: list[Episode]
    errors: list[str] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)  # seconds, for the group's record
    unused: list[Episode] = field(default_factory=list)
    dropped: str = ""

    @property
    def ended(self) -> list[Episode]:
        return [*self.episodes, *self.unused]

    @property
    def verdicts(self) -> tuple[int, int]:
        """Numbers of episodes that were correct, and that were judged."""
        judged = [episode.correct for episode in self.ended if episode.correct is not None]
        return sum(judged), len(judged)


@dataclass(frozen=True, slots=True)
class GroupRules:
    """Conditions for a group.

    min_episodes   episodes that must succeed or have no verdict; 0: all of them
    least          episodes with a verdict: 2 if advantages compare them with each other
    size           episodes after whose end the others are cancelled; 0: none are
    filter, keep   which groups are trained, and which of their episodes
    timeout_s      time for which a filter of the user may take
    """

    min_episodes: int = 0
    least: int = 1
    size: int = 0
    filter: FilterConfig = field(default_factory=FilterConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    timeout_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class PlayerExtras:
    """Optional parts of a GroupPlayer.

    eval_specs   name of an evaluation's data set -> its sampling settings, if they are not the trial's
    gateway      the endpoint of the episodes; without it ``session.base_url`` raises
    dropped      gets the training groups that are not trained, or not with all of their episodes
    """

    eval_specs: Mapping[str, SamplingSpec] = field(default_factory=dict)
    gateway: Gateway | None = None
    dropped: DroppedStore | None = None


class _Over(Exception):
    """The group is complete, or too many episodes have failed for it: the others are cancelled."""


class GroupPlayer:
    """Player of all episodes of a ticket; one object per RolloutWorker."""

    def __init__(
        self,
        agent: Agent,
        engine: CompletionEngine,
        spec: SamplingSpec,
        longest_row: int,
        group: GroupRules | None = None,
        extras: PlayerExtras | None = None,
    ) -> None:
        """``longest_row`` is the longest row that training accepts, in tokens."""
        extras = extras or PlayerExtras()
        self._agent = agent
        self._engine = engine
        self._spec = spec
        self._eval_specs = extras.eval_specs
        self._gateway = extras.gateway
        self._dropped = extras.dropped
        self._longest_row = longest_row
        self._rules = group or GroupRules()
        self._defects = Defects()
        self._filter_defect = ""  # of the last group that a filter of the user could not decide about
        self._lost_tokens: dict[str, list[int]] = {}

    def take_lost_tokens(self) -> dict[str, list[int]]:
        """Return reason -> tokens of each training episode that is not trained, since the last call."""
        lost, self._lost_tokens = self._lost_tokens, {}
        return lost

    async def play(self, ticket: Ticket, prompt: Prompt) -> Played:
        """Play ``ticket.n`` episodes at the same time; choose among those of a training group.

        Raises RolloutSuperseded if the attempt is over, StuckError if the agent fails all episodes (``Defects.stuck``),
        and the first error if too few episodes succeeded: a RewardError only if no other is the cause. A filter of the
        user that fails raises AgentError, and StuckError if it fails again in the same way with the next group.
        """
        calls = Calls(self._engine, ticket, self._eval_specs.get(ticket.set, self._spec))
        sessions = [EpisodeSession(calls, episode, self._gateway) for episode in range(ticket.n)]
        size = min(self._rules.size or ticket.n, ticket.n) if ticket.kind == "train" else ticket.n
        group = _Playing(ticket, min(self._rules.min_episodes or size, size), min(self._rules.least, ticket.n), size)
        played: Played | None = None
        try:
            ended = await self._play_all(group, calls, sessions, prompt)
            if ticket.kind == "train":
                rules, numbers = self._rules, sorted(group.episodes)
                ended.dropped = await self._reason_to_drop(ended.episodes)
                rewards = [episode.reward for episode in ended.episodes]
                kept = [] if ended.dropped else kept_episodes(rewards, rules.keep, group.ticket.seed)
                reason = label(ended.dropped) if ended.dropped else NOT_KEPT
                group.unused = {number: reason for k, number in enumerate(numbers) if k not in kept}
                ended.unused = [group.episodes[number] for number in group.unused]
                ended.episodes = [ended.episodes[k] for k in kept]
                self._keep_dropped(group, prompt, sessions, ended.dropped)
            played = ended
            return played
        except RealsysError as error:
            if not isinstance(error, RolloutSuperseded):
                self._keep_dropped(group, prompt, sessions, f"{type(error).__name__}: {error}")
            raise
        finally:
            for session in sessions if ticket.kind == "train" else ():
                reason = FAILED if played is None else group.untrained(session.episode)
                tokens = session.sampled + calls.cut_tokens[session.episode]
                if not reason:
                    reason, tokens = NOT_IN_ROWS, tokens - group.episodes[session.episode].loss_tokens
                if tokens > 0:
                    self._lost_tokens.setdefault(reason, []).append(tokens)

    async def _reason_to_drop(self, episodes: Sequence[Episode]) -> str:
        """Return why a group is not trained, "" if it is. A filter of the user runs in a thread of its own."""
        accept = self._rules.filter.accept
        if accept in FILTER.builtin:
            return reason_to_drop(episodes, self._rules.filter)
        name, timeout_s = f"{FILTER.field}={accept}", self._rules.timeout_s

        def decide() -> str | AgentError:
            try:
                return reason_to_drop(episodes, self._rules.filter)
            except BaseException as error:  # the user's code may raise anything, and its error is one of this group
                failed = described(error)
                said = str(error) if isinstance(error, AgentError) else failed.in_words()
                failure = AgentError(f"{name}: {said}", defect=f"{name}: {failed['type']} at {failed['place']}")
                failure.__cause__ = error
                return failure

        deciding = in_thread("filter", decide)
        await asyncio.wait((deciding,), timeout=timeout_s)
        too_late = f"{name}: it did not end within rollout.agent_limits.episode_timeout_s={timeout_s:g}"
        decided = deciding.result() if deciding.done() else AgentError(too_late)
        if isinstance(decided, AgentError):
            if self._defects.is_new(decided):
                log.error("%s", decided, exc_info=decided.__cause__)
            if decided.defect == self._filter_defect:
                raise StuckError(f"two groups in a row failed with the same error: {decided}")
            self._filter_defect = decided.defect
            raise decided
        self._filter_defect = ""
        return decided

    def _keep_dropped(self, group: _Playing, prompt: Prompt, sessions: Sequence[EpisodeSession], reason: str) -> None:
        """Pass a group on that is not trained for ``reason``, or whose episodes failed in part."""
        if self._dropped is None or group.ticket.kind != "train" or not (reason or group.failed):
            return
        last = {session.episode: session.last for session in sessions if session.last is not None}
        failed = {
            number: (f"{type(error).__name__}: {error}", last.get(number)) for number, error in group.failed.items()
        }
        self._dropped.add(group.ticket, prompt, reason, group.episodes, failed)

    async def _play_all(
        self, group: _Playing, calls: Calls, sessions: Sequence[EpisodeSession], prompt: Prompt
    ) -> Played:
        begin, ticket = time.perf_counter(), group.ticket
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, session in enumerate(sessions):
                    tasks.create_task(self._spanned(group, Task(prompt, ticket, number), session))
        except ExceptionGroup as errors:
            for error in errors.exceptions:
                if not isinstance(error, _Over):
                    raise error from None
        finally:
            await calls.close()
        if calls.superseded is not None:
            raise calls.superseded
        if ticket.kind == "train":
            problem = self._defects.stuck(ticket.n, len(group.episodes), list(group.failed.values()))
            if problem:
                raise StuckError(problem)
        if group.hopeless:
            raise group.first_error()
        seconds = max(session.seconds for session in sessions)
        extra = {"generate_s": seconds, "reward_s": max(0.0, time.perf_counter() - begin - seconds)}
        return Played([group.episodes[k] for k in sorted(group.episodes)], group.errors(), extra)

    async def _spanned(self, group: _Playing, task: Task, session: EpisodeSession) -> None:
        with span("episode", task.unit) as episode:
            await self._play_one(group, task, session)
            if (played := group.episodes.get(task.episode)) is not None:
                episode.facts |= {"reward": played.reward, "tokens": played.loss_tokens}
            elif (error := group.failed.get(task.episode)) is not None:
                episode.facts["error"] = type(error).__name__

    async def _play_one(self, group: _Playing, task: Task, session: EpisodeSession) -> None:
        """Play one episode and add its result to ``group``. Raises only errors that end the whole attempt."""
        try:
            episode = await self._agent.run(task, session)
            session.check()
            check_episode(episode, self._longest_row, session.sampled)
            if self._rules.filter.bounds_success and task.ticket.kind == "train" and episode.correct is None:
                raise AgentError("correct is None, but train.ppo.filter needs it: return it, or set min=0 and max=1")
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            error: RealsysError = AgentError("run was cancelled by its own code")
        except (Exception, SystemExit) as raised:  # the request boundary: the user's code may raise anything
            error = explain(raised)
            if isinstance(error, RolloutSuperseded):
                raise error from None
            if isinstance(error, AgentError) and self._defects.is_new(error):
                log.error("ticket %s episode %d: %s", task.ticket.ticket_id, task.episode, error, exc_info=raised)
        else:
            if group.add(task.episode, episode):
                raise _Over
            return
        finally:
            await session.close()
        group.failed[task.episode] = error
        # A defect of the agent cancels no other episode: only if every episode has it, it is no accident.
        if group.hopeless and not isinstance(error, AgentError):
            raise _Over


@dataclass(slots=True)
class _Playing:
    """Results of a ticket's episodes so far. ``failed`` is in the order in which they failed.

    A group needs ``needed`` episodes that were played, with or without a verdict, and ``least`` with one. It is
    complete with ``size`` episodes. ``unused``: reason of each episode that is not trained, though it belongs to them.
    """

    ticket: Ticket
    needed: int
    least: int
    size: int
    episodes: dict[int, Episode] = field(default_factory=dict)
    failed: dict[int, RealsysError] = field(default_factory=dict)
    unused: dict[int, str] = field(default_factory=dict)

    def add(self, number: int, episode: Episode) -> bool:
        """Add an episode that has ended, unless the group is complete. Return True if others are to be cancelled."""
        if len(self.episodes) < self.size:
            self.episodes[number] = episode
        return len(self.episodes) == self.size < self.ticket.n

    def untrained(self, number: int) -> str:
        """Return why an episode of a group that was played to its end is not trained; "" if it is."""
        if number in self.episodes:
            return self.unused.get(number, "")
        return FAILED if number in self.failed else OVER_SAMPLED

    @property
    def hopeless(self) -> bool:
        """True if too few episodes are left for a group."""
        broken = sum(not isinstance(error, RewardError) for error in self.failed.values())
        return broken > self.ticket.n - self.needed or len(self.failed) > self.ticket.n - self.least

    def first_error(self) -> RealsysError:
        """Return the first error that is not a missing verdict, else the first error."""
        return min(self.failed.values(), key=lambda error: isinstance(error, RewardError))

    def errors(self) -> list[str]:
        """Return one line for each episode that failed."""
        return [one_line(f"episode {k}: {type(error).__name__}: {error}") for k, error in sorted(self.failed.items())]


def group_player(
    config: Config,
    agent: Agent,
    engine: CompletionEngine,
    end_of_text: Sequence[int],
    gateway: Gateway | None = None,
    dropped: DroppedStore | None = None,
) -> GroupPlayer:
    """Return the player of a trial. ``end_of_text``: the tokenizer's own stop tokens."""
    eval_specs = {name: sampling_spec(made.sampling, end_of_text) for name, made in evaluation_sets(config).items()}
    return GroupPlayer(
        agent,
        engine,
        sampling_spec(config.generation.sampling, end_of_text),
        config.train.microbatch_tokens,
        group_rules(config),
        PlayerExtras(eval_specs, gateway, dropped),
    )


def group_rules(config: Config) -> GroupRules:
    """Return the conditions for a group from the trial's settings."""
    advantage = config.train.ppo.advantage
    least = 2 if "group" in (advantage.mean, advantage.std) else 1
    rollout = config.rollout
    timeout_s = rollout.agent_limits.episode_timeout_s
    return GroupRules(rollout.min_episodes, least, rollout.group_size, config.train.ppo.filter, rollout.keep, timeout_s)


def sampling_spec(config: SamplingConfig, end_of_text: Sequence[int]) -> SamplingSpec:
    """Return the trial's sampling settings, with the tokenizer's own stop tokens; ``n`` is set per call."""
    stops = tuple(dict.fromkeys((*end_of_text, *config.stop_token_ids)))
    penalties = {f"{name}_penalty": value for name, value in config.penalties}
    settings = {
        **config.model_dump(exclude={"penalties", "stop_token_ids"}),
        "top_k": config.top_k or -1,
        "stop": tuple(config.stop),
    }
    return SamplingSpec(**settings, **penalties, stop_token_ids=stops)


# ---- defects of a user's agent or environment: reported with their place, logged once, and fatal if they repeat


MOST_FAILED = 128  # episodes in a row; an agent that fails 90 % of all reaches it with a probability of 1e-6
MAX_LOGGED = 1000  # distinct messages that are logged
MAX_LINE = 2000  # characters of an error in a report to the manager, and in the record of a group


def one_line(text: str, limit: int = MAX_LINE) -> str:
    """Convert any text to one line that can be sent: bounded, without lone surrogates, which UTF-8 cannot encode."""
    return " ".join(text.split())[:limit].encode("utf-8", "replace").decode()


def explain(error: BaseException) -> RealsysError:
    """Return the error of an episode: a RealsysError unchanged, anything else as AgentError with type and place.

    Of an exception group (a TaskGroup of the agent) the first RealsysError counts, else its first exception.
    """

    def priority(leaf: BaseException) -> tuple[bool, bool]:
        return not isinstance(leaf, RolloutSuperseded), not isinstance(leaf, RealsysError)

    first = min(_leaves(error), key=priority)
    if isinstance(first, RealsysError):
        return first
    failed = described(first)
    kind, place = failed["type"], failed["place"]
    return AgentError(f"{kind}: {failed['message']} ({place})", defect=f"{kind} at {place}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


class Defects:
    """Memory of the defects in one RolloutWorker."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._last = ""  # defect of every episode of the last ticket
        self._failed = Counter[str]()  # defects of the episodes since the last good one

    def is_new(self, error: AgentError) -> bool:
        """Return True for a message that was not logged before."""
        message = str(error)
        if message in self._logged or len(self._logged) >= MAX_LOGGED:
            return False
        self._logged.add(message)
        return True

    def stuck(self, episodes: int, good: int, errors: Sequence[RealsysError]) -> str:
        """Record a training ticket of ``episodes``, some of them ``good``. Return why the run is stuck, or "".

        It is if every episode of two tickets in a row has the same defect, and if the agent has failed too many
        episodes in a row in any way. One episode with a defect proves nothing: its prompt may be the cause.
        """
        defects = [error.defect for error in errors if isinstance(error, AgentError)]
        if good:
            self._last = ""
            self._failed.clear()
            return ""
        self._failed.update(defects)
        same = defects[0] if len(defects) == episodes > 1 and len(set(defects)) == 1 else ""
        again = bool(same) and same == self._last
        self._last = same
        if again:
            return f"every episode of two tickets in a row failed with the same error: {errors[0]}"
        if self._failed.total() < MOST_FAILED:
            return ""
        defect, count = self._failed.most_common(1)[0]
        return f"the agent failed {self._failed.total()} episodes, and none was good; {count} of them: {defect}"
