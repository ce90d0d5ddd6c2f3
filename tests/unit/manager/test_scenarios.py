"""Scenarios of the control plane: text scripts with recorded output, run against the real ManagerState.

The output of a command is indented below it, and ``REALSYS_REWRITE=1`` records it anew.

The commands are the operations of the manager and the methods of Scenario.

The fields of an operation's request follow in order or by name, in JSON without spaces. ``#3`` is ticket 3, ``@A`` a
trainer that is older than ``@B``. The worker is w and the trainer the current one, unless the script says otherwise.
"""

import dataclasses
import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from realsys.manager import operations
from realsys.manager.decisions import ManagerState
from realsys.manager.ledger.events import Resumed
from realsys.manager.messages import AllocateReply, Refusal
from realsys.manager.operations import explain
from realsys.manager.routing.servers import Idle, Probe, UpdateOrder
from realsys.types import PublishedVersion
from tests.support.ledger.manager_states import ANSWER, SETTINGS, address, update

TRAINERS = {f"@{name}": f"{number:019d}" for number, name in enumerate("ABC", 1)}


def value_of(text):
    """Return the value of a word: JSON, or the text itself."""
    for name, incarnation in TRAINERS.items():
        text = text.replace(name, incarnation)
    text = re.sub(r"#(\d+)", lambda match: f"{int(match[1]):010d}", text.partition("=")[2] or text)
    try:
        return json.loads(text)
    except ValueError:
        return text


def shown_ticket(ticket):
    reissues = f" {ticket.reissues} x too old" if ticket.reissues else ""
    return f"{ticket.ticket_id} attempt {ticket.attempt} prompt {ticket.prompt_index} {ticket.kind}{reissues}"


def shown(reply):
    """Return a reply as text, without the fields that say nothing."""
    if isinstance(reply, AllocateReply) and reply.tickets:
        return "\n".join(map(shown_ticket, reply.tickets))
    fields = {key: value for key, value in msgspec.to_builtins(reply).items() if value not in (None, [], {}, "")}
    return " ".join(f"{key}={json.dumps(value)}" for key, value in fields.items()) or "ok"


def shortened(text):
    """Return ``text`` with the names of scripts."""
    for name, incarnation in TRAINERS.items():
        text = text.replace(incarnation, name)
    return re.sub(r"\b0{5}(\d{5})\b", lambda match: f"#{int(match[1])}", text)


class Scenario:
    def __init__(self):
        self.state, self.now, self.journal = ManagerState(SETTINGS), 0.0, []

    def settings(self, **changes):
        self.state = ManagerState(dataclasses.replace(SETTINGS, **changes))

    def open(self, now):
        self.state.open(float(now))

    def resume(self, step, groups, cursor, pending):
        self.journal = [Resumed("/c", step, groups, cursor, pending, 0.0)]
        self.restart()

    def master(self, status):
        self.state.master = status

    def time(self, now):
        self.now = now

    def servers(self, *numbers):
        self.state.observe_servers([address(number) for number in numbers])

    def publish(self, version, trainer=None):
        incarnation = self.state.trainer_incarnation if trainer is None else str(trainer)
        if not self.state.servers.publish(PublishedVersion(version, incarnation, f"/v{version}", version)):
            return f"version {version} is not newer"
        return None

    def verify(self, number):
        """Run the due update of a server."""
        name = f"generation_server/{number}"
        if isinstance(idle := self.state.next_order(name, "1", self.now), Idle):
            return "not due" if idle.until is None else f"not due until {idle.until}"
        update(self.state, number, self.now)
        return None

    def has(self, number, version):
        """Ask a server that has an update due: it has ``version``."""
        order = self.state.next_order(f"generation_server/{number}", "1", self.now)
        self.state.begin_update(order, self.now)
        served = order.served(str(version), f"/v{version}")
        if served is None:
            return "must load"
        self.state.servers.succeeded(served, 0.1, None)
        return None

    def holds(self):
        kept = self.state.servers.holds.items()
        return "\n".join(f"{name[-1]} {'keeps' if h.keeps else 'drains'} until {h.until}" for name, h in kept) or "none"

    def goal(self):
        """Show the version that each server must have."""
        goals = ((s.name[-1], self.state.servers.goal(s)) for s in self.state.servers.all())
        return "\n".join(f"{number} {goal and goal.version}" for number, goal in goals)

    def pins(self):
        pins = operations.pins(self.state).items()
        return "\n".join(f"{name} {p['version']} on {[s[-1] for s in p['servers']]}" for name, p in pins) or "none"

    def probe(self, number, version=None):
        """Run the due probe of a server: it serves ``version``, or does not answer."""
        probe = self.state.servers.next_probe(f"generation_server/{number}", "1", self.now)
        if not isinstance(probe, Probe):
            return f"not due until {probe.until}"
        if version is None:
            self.state.servers.silent(probe, "timeout", self.now)
            return "quarantined"
        suspects = self.state.servers.answered(probe, str(version), f"/v{version}", self.now)
        return " ".join(["suspects:", *suspects]) if suspects else "answers"

    def fail(self, number, error):
        """Begin the due update of a server, and let it fail."""
        order = self.state.next_order(f"generation_server/{number}", "1", self.now)
        if not isinstance(order, UpdateOrder):
            return f"not due until {order.until}"
        self.state.begin_update(order, self.now)
        self.state.servers.failed(order, str(error), self.now)
        return None

    def states(self):
        return "\n".join(
            f"{s.name[-1]} {s.state} at {s.verified.version if s.verified else 'no version'}"
            for s in self.state.servers.all()
        )

    def in_use(self):
        return " ".join(map(str, self.state.servers.in_use()))

    def workers(self, **incarnations):
        beats = {name: json.dumps({"incarnation": str(number)}) for name, number in incarnations.items()}
        return " ".join(["lost:", *self.state.observe_workers(beats, self.now)])

    def expire(self):
        return " ".join(["lost:", *self.state.expire(self.now)])

    def restart(self, how="replay"):
        if how == "compacted":
            self.journal = [self.state.snapshot(self.now)]
        self.state = ManagerState(self.state.settings)
        self.state.restore_from(self.journal)

    def ledger(self):
        counts = " ".join(f"{state}={n}" for state, n in self.state.ledger.counts.by_state().items() if n)
        places = " ".join(f"{s.name[-1]}:{self.state.reservations.load(s.name)[0]}" for s in self.state.servers.all())
        return f"N={self.state.ledger.counted} {counts} places={places or 'none'}; {explain(self.state)}"

    def run(self, line):
        name, *words = line.split()
        named = {key: value_of(text) for key, _, text in (w.partition("=") for w in words if re.match(r"\w+=", w))}
        plain = [value_of(word) for word in words if not re.match(r"\w+=", word)]
        try:
            output = getattr(self, name)(*plain, **named) if hasattr(self, name) else self.call(name, plain, named)
        except Refusal as refusal:
            output = f"{refusal.status} {refusal}"
        self.journal += self.state.outbox
        self.state.outbox = []
        return shortened(output or "")

    def call(self, name, plain, named):
        operation = getattr(operations, name.upper())
        if not operation.is_post:
            return shown(operation.decide(self.state, *plain or [None], self.now))
        names = operation.request.__struct_fields__
        running = self.state.evaluations.running.get(plain[0]) if plain else None
        at = running.ticket.version if running is not None else 0
        answers = [msgspec.structs.replace(ANSWER, version_min=at, version_max=at)]
        fields = {"incarnation": self.state.trainer_incarnation, "worker": "w", "answers": answers, "request_id": ""}
        body = {key: value for key, value in fields.items() if key in names}
        body |= dict(zip(names, plain, strict=False)) | named
        request = msgspec.convert(msgspec.to_builtins(body), operation.request)
        return shown(operation.decide(self.state, request, self.now))


SCRIPTS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scenario_has_its_recorded_output(script):
    scenario, played = Scenario(), []
    for line in script.read_text().splitlines():
        if not line.startswith("    "):
            played.append(line)
            if line and not line.startswith("#"):
                played += [f"    {output}" for output in scenario.run(line).splitlines()]
    text = "\n".join(played) + "\n"
    if os.environ.get("REALSYS_REWRITE") == "1":
        script.write_text(text)
    assert script.read_text() == text
