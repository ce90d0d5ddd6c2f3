"""Refusals of the manager: the pure state raises them, and the HTTP surface turns each into its status and one line."""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """A call that the manager does not carry out. The text is one line for the caller."""

    status: ClassVar[int]


class BadCall(Refusal, ValueError):
    """The call contradicts itself, the configuration or the ledger: repeating it changes nothing."""

    status = 400


class NotFound(Refusal):
    """The manager does not know the thing that the call names."""

    status = 404


class NotRunning(Refusal):
    """The attempt has been superseded, or was never granted: its worker must cancel it."""

    status = 409


class OlderTrainer(Refusal):
    """A younger trainer has started since: the caller must end (``monotonic``)."""

    status = 409


class NoServer(Refusal):
    """No server may take the request now: the manager waits a moment before it refuses, and the caller tries again."""

    status = 503
