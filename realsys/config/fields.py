"""Types of fields with their bounds, and the base of all sections of the configuration."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from realsys.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

log = logging.getLogger(__name__)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
OpenProbability = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running mean, which would never change with a decay of 1
#: bounds that no run needs to exceed: a typo in an exponent is refused before the start
LearningRate = Annotated[float, Field(gt=0, le=1)]
SmallFloat = Annotated[float, Field(ge=0, le=10)]
Temperature = Annotated[float, Field(ge=1e-6, le=10)]
Offload = Literal["none", "optimizer", "all"]


#: fields and sections of earlier builds -> their name now. An override with the old name is refused; a stored trial is
#: read.
RENAMED: Mapping[str, str] = {
    "asynchronous.max_head_offpolicyness": "asynchronous.max_staleness",
    "agreement.max_difference": "train.engine_check",
    "generation.sampling.frequency_penalty": "generation.sampling.penalties.frequency",
    "generation.sampling.presence_penalty": "generation.sampling.penalties.presence",
    "generation.sampling.repetition_penalty": "generation.sampling.penalties.repetition",
    "roles.custom": "roles",
    "rollout.reward.judge": "data.verifier_args",
    "train.ppo.reward_model.weight": "train.ppo.reward_model_weight",
}


def _option(name: str) -> tuple[str, Callable[[Any], Any]]:
    return "cluster.slurm.options", lambda value: [f"--{name}={value}"] if value else None


#: fields of earlier builds that another field expresses now -> that field, and its value from a stored one, if not None
EXPRESSED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "agreement.sample_tokens": ("train.engine_check", lambda tokens: None if tokens else 0.0),
    "cluster.slurm.constraint": _option("constraint"),
    "cluster.slurm.qos": _option("qos"),
    "cluster.slurm.reservation": _option("reservation"),
    "evaluate_only": ("train.loop", lambda evaluates: "evaluate" if evaluates else None),
    "generation.embedded.on_gpu": ("model.small_on_gpu", lambda allowed: allowed or None),
    "generation.threads": ("cluster.threads", lambda threads: None if threads == 1 else threads),
    "model.float32_on_gpu": ("model.small_on_gpu", lambda allowed: allowed or None),
    "record.samples": ("record.keep_steps", lambda samples: None if samples else 0),
    "rollout.agent_limits.tool_s": ("rollout.agent_args.tool_s", lambda seconds: None if seconds == 30.0 else seconds),
    "train.optimizer.momentum": ("train.optimizer.beta1", lambda momentum: None),
    "train.ppo.critic.loss": ("train.ppo.critic.huber_delta", lambda loss: 0.0 if loss == "mse" else None),
    "train.ppo.filter.equal_rewards": ("train.ppo.filter.accept", lambda equal: "unequal_rewards" if equal else None),
    "train.ppo.kl.adaptive": ("train.ppo.kl.target", lambda adaptive: None if adaptive else 0.0),
    "train.ppo.reward_model.enabled": ("train.ppo.reward_model_weight", lambda enabled: None if enabled else 0.0),
    "train.ppo.turn_gamma": ("train.ppo.turn_rewards", lambda gamma: None if gamma == 1.0 else gamma),
    "train.threads": ("cluster.threads", lambda threads: None if threads == 1 else threads),
    "warmup.optimizer.momentum": ("warmup.optimizer.beta1", lambda momentum: None),
}
#: fields of earlier builds that are constants now, in the module of the part that uses them
CONSTANT: Mapping[str, object] = {
    "agreement.floor": 1e-4,
    "agreement.max_growth": 4.0,
    "agreement.window": 8,
    "asynchronous.max_reissues": 2,
    "cluster.ray.namespace": "",
    "cluster.stop_progress_s": 20.0,
    "data.curriculum.floor": 0.1,
    "evaluation.hold_s": 600.0,
    "evaluation.hold_share": 0.25,
    "generation.embedded.prefill_tokens": 1024,
    "generation.progress_timeout_s": 600.0,
    "generation.sglang.max_answers": 8192,
    "generation.sglang.max_restarts": 5,
    "manager.blame_reporters": 2,
    "manager.blame_window_s": 30.0,
    "manager.blame_wrong_reports": 3,
    "manager.rolling_fraction": 0.5,
    "manager.rolling_retry_timeout_s": 30.0,
    "rollout.agent_limits.blocking_s": 10.0,
    "rollout.agent_processes": 128,
    "rollout.agent_limits.processes": 64,
    "rollout.gateway.max_body": 32 << 20,
    "rollout.gateway.max_in_flight": 32,
    "rollout.gateway.retry_window_s": 60.0,
    "rollout.reward.service_items": 4096,
    "telemetry.span_mib": 32,
    "telemetry.tracker_finish_s": 10,
    "train.max_skipped_steps": 5,
    "train.optimizer.decoupled_weight_decay": True,
    "train.ppo.advantage.eps": 1e-6,
    "train.ppo.critic.value_norm_beta": 0.995,
    "warmup.optimizer.decoupled_weight_decay": True,
    "weights.full_every": 8,
}
_JUDGE = "rollout.reward.judge"


def present_name(path: str) -> str | None:
    """Return what became of a field of an earlier build, for the error; None if there was no such field."""
    for old, new in (*RENAMED.items(), *((old, new) for old, (new, _) in EXPRESSED.items())):
        if f"{path}.".startswith(f"{old}."):
            return f"is {new}{path.removeprefix(old)} now"
    return f"is no setting any more: it is always {CONSTANT[path]!r}" if path in CONSTANT else None


def with_present_names(tree: object) -> object:
    """Return the values of a stored configuration without fields of earlier builds. Changes ``tree``.

    A value that was set, and that this build would not use, is named in a warning.
    """
    for field in (*RENAMED, *EXPRESSED, *CONSTANT):
        place, name = _place(tree, field)
        if name not in place:
            continue
        value = place.pop(name)
        if field == _JUDGE:
            users = (_place(tree, "data.verifier")[0], *_entries(tree, "evaluation.sets"))
            for user in (user for user in users if user.get("verifier") == "judge"):
                user["verifier_args"] = value
        elif field in RENAMED:
            place, name = _place(tree, RENAMED[field], make=True)
            present = place.setdefault(name, value)
            if present is not value and isinstance(present, dict) and isinstance(value, dict):
                place[name] = value | present
        elif field in EXPRESSED:
            new, expressed = EXPRESSED[field]
            if (value := expressed(value)) is not None:
                place, name = _place(tree, new, make=True)
                place[name] = [*value, *place.get(name, [])] if isinstance(value, list) else value
        elif value != CONSTANT[field]:
            log.warning("config.json: %s=%r has no effect: it is always %r now", field, value, CONSTANT[field])
    for role in _entries(tree, "roles"):
        for name in ("decoupled_weight_decay", "momentum"):  # as in train.optimizer
            role.get("optimizer", {}).pop(name, None)
    for section in {field.rpartition(".")[0] for field in (*RENAMED, *EXPRESSED, *CONSTANT)}:
        place, name = _place(tree, section)
        if place.get(name) == {}:  # all of its fields are of earlier builds
            del place[name]
    return tree


def _place(tree: object, field: str, *, make: bool = False) -> tuple[dict[str, Any], str]:
    """Return the section of a field, and the field's name in it. A section that is missing is made, or empty."""
    *sections, name = field.split(".")
    for section in sections:
        if make and isinstance(tree, dict):
            tree.setdefault(section, {})
        tree = tree.get(section) if isinstance(tree, dict) else None
    return (tree if isinstance(tree, dict) else {}), name


def _entries(tree: object, field: str) -> list[dict[str, Any]]:
    """Return the sections in a mapping."""
    place, name = _place(tree, field)
    entries = place.get(name)
    return [entry for entry in entries.values() if isinstance(entry, dict)] if isinstance(entries, dict) else []


#: regular expression of a field -> what its text must be, for the error
PATTERNS: dict[str, str] = {}


def pattern(expression: str, rule: str) -> Any:
    """Return the bounds of a text that matches ``expression``; else the error says "must be" and ``rule``."""
    PATTERNS[expression] = rule
    return Field(pattern=expression)


Name = Annotated[
    str,
    pattern(
        r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        "1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit",
    ),
]


class Section(BaseModel):
    """Base of all sections. Unknown keys, lossy conversions, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def is_arguments(info: FieldInfo) -> bool:
    """Return True if a section is the arguments of one part: one setting, which alone among sections has a description.

    The page that the description names has the arguments.
    """
    return bool(info.description)


_Section = TypeVar("_Section", bound=BaseModel)


def replaced(section: _Section, path: Sequence[str], value: Any) -> _Section:
    """Return a copy of a section in which the field at ``path`` has ``value``."""
    tree: Any = section
    name, *rest = path
    if isinstance(tree, dict):
        return tree | {name: replaced(tree[name], rest, value) if rest else value}  # type: ignore[return-value]
    return section.model_copy(update={name: replaced(getattr(section, name), rest, value) if rest else value})


def arguments_of(section: type[_Section], values: Mapping[str, Any], field: str) -> _Section:
    """Return the arguments of a part, which the mapping ``field`` has. Raises ConfigError, which names the argument."""
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path, value = ".".join(map(str, (field, *first["loc"]))), first["input"]
        if first["type"] == "extra_forbidden":
            problem = f"unknown{did_you_mean(first['loc'][-1], list(section.model_fields))}"
            raise ConfigError(path, value, problem) from None
        raise ConfigError(path, value, problem_of(path, first)) from None


def problem_of(path: str, error: ErrorDetails) -> str:
    """Return what is wrong with the value of a known field."""
    value = error["input"]
    if error["type"] == "string_type" and isinstance(value, bool | int | float):
        return f"must be text: write {path}=\"'{value}'\""
    if error["type"] == "string_pattern_mismatch":
        return f"must be {PATTERNS[error['ctx']['pattern']]}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    choices = re.findall("'([^']*)'", error["ctx"]["expected"]) if error["type"] == "literal_error" else []
    return message + did_you_mean(value, choices)


def did_you_mean(value: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(value), known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
