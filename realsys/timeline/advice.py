"""Advice on how to make a trial faster. Pure rules over the times of its steps and over the use of its processes.

Each line names the cause, the setting, and at most how much it can gain: the percentage of the time that would be saved
if the cause vanished. The rules do not know what a change costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from realsys.config.schema import Config
from realsys.timeline.step_times import StepTime
from realsys.timeline.usage import ServerUse, WorkerUse

#: whole percentage of the time below which a cause is not worth a line
WORTH = 5
#: a server that computes less than this share of the completions of its fullest moment has room
FEW = 0.5
#: waiting completions, as a share of those at its fullest moment, from which a server is called full
QUEUED = 0.1


@dataclass(frozen=True, slots=True)
class Facts:
    """Input of the rules. ``waits``: percentage of the time by part of the trainer's wait; empty without spans."""

    time: StepTime
    waits: Mapping[str, int]
    servers: ServerUse
    workers: WorkerUse
    config: Config | None


def advice(facts: Facts) -> list[str]:
    """Return what would help, the largest gain first."""
    found = [*_of_waits(facts), *_of_trainer(facts)]
    found.sort(key=lambda item: -item[0])
    return [f"{text} (gains at most {gain} %)" for gain, text in found if gain >= WORTH]


def _of_waits(facts: Facts) -> Iterator[tuple[int, str]]:
    waits = facts.waits
    if not waits:
        yield facts.time.percents["wait"], "the trainer waits for generation: give generation more devices (allocation)"
        return
    yield waits.get("decode", 0) + waits.get("prefill", 0) + waits.get("queue", 0), _about_servers(facts)
    yield waits.get("ticket", 0), _about_tickets(facts)
    yield waits.get("reward", 0), _about_rewards(facts)
    yield waits.get("tool", 0) + waits.get("agent", 0), "batches wait for the agent: make it and its tools faster"
    yield waits.get("route", 0), "calls wait for a server that may serve: see its state on the status page"
    yield waits.get("push", 0) + waits.get("claim", 0), "batches wait for the trainer's network and the manager"
    yield waits.get("transit", 0), "requests wait between RolloutWorker and server: start more rollout.workers"


def _about_servers(facts: Facts) -> str:
    servers = facts.servers
    load = f"{servers.running:.0f} completions run in a server on average, {servers.most} at most"
    if servers.queued > QUEUED * servers.most:
        full = f"{servers.queued:.0f} completions wait in each server"
        return f"servers are full ({full}, {load}): add servers (allocation), or let each run more"
    if servers.running < FEW * servers.most:
        return f"batches wait for their last completions while servers have room ({load}): {_more_ahead(facts)}"
    return f"batches wait for completions ({load}): give generation more devices (allocation), or shorten completions"


def _more_ahead(facts: Facts) -> str:
    eta = facts.config.asynchronous.max_head_offpolicyness if facts.config is not None else 0
    return (
        f"let generation run further ahead (asynchronous.max_head_offpolicyness, now {eta}; rollout.max_concurrent), "
        "or shorten the longest completions (generation.sampling.max_new_tokens)"
    )


def _about_tickets(facts: Facts) -> str:
    reasons = facts.workers.reasons
    if reasons and max(reasons, key=lambda name: reasons[name]) != "staleness":
        often = max(reasons, key=lambda name: reasons[name])
        return f"RolloutWorkers get no tickets (most often: {often})"
    return f"RolloutWorkers wait for tickets, because of the bound on staleness: {_more_ahead(facts)}"


def _about_rewards(facts: Facts) -> str:
    services = facts.config.rollout.reward.services if facts.config is not None else 0
    how = "rollout.reward.services" if services else "rollout.reward.processes, or rollout.reward.services"
    return f"batches wait for verdicts: increase {how}, or make the verifier faster"


def _of_trainer(facts: Facts) -> Iterator[tuple[int, str]]:
    percents = facts.time.percents
    yield percents["publish"], "the trainer waits for the publication of the version before: use a faster disk"
    yield percents["copy"], "copying weights to host memory takes long"
    yield percents["checkpoint"], "checkpoints take long: increase checkpoint.every_steps"
    yield percents["between"], "evaluations hold up training: lower evaluation.every_problems, or make them rarer"
    if percents["wait"] >= WORTH:
        return
    calls = percents["inference"] + percents["train"]
    empty = 100 * facts.workers.empty / max(1e-9, facts.workers.empty + facts.workers.playing)
    spare = f", which has {empty:.0f} % of its places empty" if empty >= WORTH else ""
    yield calls, f"training is the slower side: move devices from generation to training (allocation){spare}"
