"""Which machine has which node of the plan. Pure: no I/O, no clock.

    machine joins ──> the node that bears its name, else the node that it had, else the first free node that it fits,
                  │   of those that need GPUs if it has any
                  └─> a spare, if no node is free
    machine lost  ──> its node is free ──> the first spare that fits takes it, else the next machine that joins

`one-machine`  a node has at most one machine, and a machine at most one node
`first`        the first node waits for the launcher's own machine until that joins: to lose it ends the run in any case
`fits`         a machine gets only a node whose processes it can hold
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from realsys.config.devices.device_plan import Needs, Node


@dataclass(slots=True)
class Binding:
    """Nodes of a plan with their needs, and the machines that have joined.

    ``first``: name of the launcher's machine, for which the first node is kept; "" without such a machine, and once it
    has joined.
    """

    needs: Mapping[str, Needs]
    first: str = ""
    machine_of: dict[str, str] = field(default_factory=dict)  # node -> machine; bound nodes only
    spares: dict[str, Node] = field(default_factory=dict)  # machines without a node, in the order of their joins
    _machines: dict[str, Node] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)  # machine -> node that it had last

    @property
    def free(self) -> list[str]:
        """Nodes without a machine, in the order of the plan."""
        return [node for node in self.needs if node not in self.machine_of]

    def knows(self, machine: str) -> bool:
        """Return True if the machine has joined and is not lost."""
        return machine in self._machines

    def node_of(self, machine: str) -> str:
        """Return the node that the machine has, or ""."""
        return next((node for node, name in self.machine_of.items() if name == machine), "")

    def misfit(self, machine: Node) -> str:
        """Return why no node of the plan suits the machine; "" if one does."""
        nodes = [machine.name] if machine.name in self.needs else list(self.needs)
        problems = [(node, self.needs[node].problem(machine)) for node in nodes]
        if any(not problem for _, problem in problems):
            return ""
        node, problem = next((each for each in problems if each[0] in self.free), problems[0])
        return f"{machine.name} cannot be {node}: {problem}"

    def join(self, machine: Node) -> str:
        """Add a machine that has joined. Returns the node that it gets, "" if it is a spare."""
        assert machine.name not in self._machines, f"{machine.name} has joined already"
        self._machines[machine.name] = machine
        if machine.name == self.first:
            self._last[machine.name] = next(iter(self.needs))
            self.first = ""
        node = next((node for node in self._wishes(machine) if node in self.free), "")
        if node:
            self._bind(node, machine.name)
        else:
            self.spares[machine.name] = machine
        return node

    def leave(self, name: str) -> tuple[str, str]:
        """Remove a machine that is lost. Returns its node and the spare that takes it; "" for none."""
        del self._machines[name]
        self.spares.pop(name, None)
        node = self.node_of(name)
        if not node:
            return "", ""
        del self.machine_of[node]
        spare = next((each.name for each in self.spares.values() if node in self._wishes(each)), "")
        if spare:
            del self.spares[spare]
            self._bind(node, spare)
        return node, spare

    def _bind(self, node: str, machine: str) -> None:
        self.machine_of[node] = machine
        self._last[machine] = node

    def _wishes(self, machine: Node) -> list[str]:
        """Nodes that the machine may have, the preferred ones first."""
        if machine.name in self.needs:
            return [machine.name]
        kept = next(iter(self.needs)) if self.first else ""
        fitting = [node for node, needs in self.needs.items() if node != kept and not needs.problem(machine)]
        # A machine with GPUs must not take a node that needs none while another one needs them.
        return sorted(fitting, key=lambda node: (node != self._last.get(machine.name), not self.needs[node].gpus))
