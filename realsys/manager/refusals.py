"""Answers of the manager that are no: each with one line for whoever asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoServer:
    """Why a request cannot be routed now."""

    problem: str


@dataclass(frozen=True, slots=True)
class NotRunning:
    """The attempt that asks has been superseded or never granted."""

    problem: str


@dataclass(frozen=True, slots=True)
class OlderTraining:
    """A younger training side has started since: the one that asks must end."""

    problem: str
