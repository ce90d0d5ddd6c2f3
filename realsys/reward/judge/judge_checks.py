"""Checks of the judge's settings before anything starts. A value that may be a key is never shown."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from realsys.config.evaluation_sets import verifier_arguments, verifier_field
from realsys.config.schema import Config
from realsys.config.sections.schema_judge import JudgeConfig
from realsys.errors import ConfigError
from realsys.reward.judge.rubric import Rubric, RubricError

_FIELD = "rollout.reward.judge"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_FIELDS = ("messages", "model", "n", "stream")


def check_judge(config: Config) -> None:
    """Check address, key, rubric and limits. Raises ConfigError."""
    judge = config.rollout.reward.judge
    verifiers, services = verifier_arguments(config), config.rollout.reward.services
    if verifiers["judge"]:
        raise ConfigError(
            f"{verifier_field(config, 'judge')}_args", dict(verifiers["judge"]), f"the judge has none: set {_FIELD}"
        )
    if services and list(verifiers) == ["judge"]:
        problem = "a judge runs in the RolloutWorkers: set it to 0"
        raise ConfigError("rollout.reward.services", services, problem)
    _check_address(judge)
    _check_key(judge.api_key_env)
    try:
        Rubric(judge)
    except RubricError as error:
        field = "criteria" if "criteri" in str(error) else "rubric"
        raise ConfigError(f"{_FIELD}.{field}", getattr(judge, field), str(error)) from None
    if own := [name for name in _OWN_FIELDS if name in judge.request]:
        raise ConfigError(f"{_FIELD}.request", judge.request, f"must not set {own[0]}, which realsys sets itself")
    workers = config.rollout.workers
    for name in ("concurrency", "requests_per_minute", "tokens_per_minute"):
        if 0 < (limit := getattr(judge, name)) < workers:
            problem = f"is divided among rollout.workers ({workers}): raise it, or use fewer RolloutWorkers"
            raise ConfigError(f"{_FIELD}.{name}", limit, problem)


def _check_address(judge: JudgeConfig) -> None:
    field = f"{_FIELD}.base_url"
    try:
        parts = urlsplit(judge.base_url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(field, judge.base_url, "must be an address such as http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        problem = "must be an address alone: name the variable that has the key in api_key_env"
        raise ConfigError(field, f"{parts.scheme}://***", problem)
    if not judge.model:
        raise ConfigError(f"{_FIELD}.model", "", "name the model that the endpoint serves")


def _check_key(variable: str) -> None:
    field = f"{_FIELD}.api_key_env"
    if not variable:
        return
    if not _VARIABLE.fullmatch(variable):
        raise ConfigError(field, "***", "must be the name of an environment variable, not the key itself")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(field, variable, "is not set: put the key of the endpoint into this environment variable")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(field, variable, "has characters that no key has: it must be one line of plain text")
