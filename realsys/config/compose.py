"""Composition: shipped YAML + overrides -> one validated Config, done once per trial.

    schema's defaults <- configs/config.yaml <- generation/, name_store/, cluster/ <- experiment/NAME.yaml  (hydra)
                                             <- key=value overrides
                                    v
                       realsys.config.schema.Config (types, bounds, unknown keys)

Every error leaves as a ConfigError that names the field, its value and the problem; hydra's, OmegaConf's and pydantic's
own exceptions stay in here. hydra is imported inside ``compose`` so that ``realsys --help`` does not pay for it.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from realsys.config.fields import did_you_mean, is_arguments, present_name, problem_of
from realsys.config.schema import Config
from realsys.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig
    from pydantic_core import ErrorDetails

CONFIG_MODULE = "realsys.configs"
_ROOT = "config"
_EXPERIMENT = "experiment"
_PACKAGE = re.compile(r"\s*#\s*@package\b")
_HEAD = re.compile(r"\s*(#\s*@|$)")  # lines that hydra passes over before it
#: group -> the field that its options set; its default option sets it, too, and then no user has chosen the value
_CHOSEN_BY = {
    "generation": "generation.backend",
    "name_store": "cluster.name_store.backend",
    "cluster": "cluster.launcher",
}


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> Config:
    """Compose and validate the configuration of one trial.

    ``overrides`` are hydra's: ``group=option`` or ``field.path=value``. ``config_dir`` has the user's files, which are
    searched after the shipped ones. Rules over several fields are in rules.py.
    Raises ConfigError.
    """
    return validate(_merge(overrides, config_dir, with_defaults=True))


def with_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Return ``config`` with ``field.path=value`` overrides. Raises ConfigError, also for a group."""
    tree, groups = config.model_dump(), config_groups(None)
    for text in overrides:
        key, value = _read(text, groups)
        if key in groups:
            raise ConfigError(key, value, "the trial's own settings are used: set fields, e.g. seed=2")
        tree = _over(tree, functools.reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value))
    return validate(tree)


def _over(base: Any, new: Any) -> Any:
    """Return ``new`` over ``base``: sections are merged, as hydra does it."""
    if not isinstance(base, dict) or not isinstance(new, dict):
        return new
    return base | {name: _over(base.get(name), value) for name, value in new.items()}


def validate(tree: object) -> Config:
    """Check a plain tree of values against the schema. Raises ConfigError for the first wrong field, naming others."""
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
        field, value, problem = _explain(errors[0])
        if len(errors) > 1:
            others = ", ".join(_path(e) for e in errors[1:4])
            problem += f" (also wrong: {others}{', ...' if len(errors) > 4 else ''})"
        raise ConfigError(field, value, problem) from None


def fields(section: type[BaseModel] = Config, prefix: str = "", *, arguments: bool = False) -> Iterator[str]:
    """Yield the dotted paths of all fields of the schema. The arguments of a part are one field, or each of them."""
    for name, info in section.model_fields.items():
        nested = _section_of(info.annotation)
        if nested is None or (is_arguments(info) and not arguments):
            yield prefix + name
        else:
            yield from fields(nested, f"{prefix}{name}.", arguments=arguments)


def _section_of(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


# ---- hydra


def _merge(overrides: Sequence[str], config_dir: Path | None, *, with_defaults: bool) -> object:
    """Merge the chosen files, then the fields of ``overrides``, over the schema's defaults; returns a plain tree.

    Without defaults the values of interpolations stay as they are written.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups = config_groups(config_dir)
    read = [_read(text, groups) for text in overrides]
    choices = tuple(f"{key}={value}" for key, value in read if key in groups)
    if not any(choice.startswith(f"{_EXPERIMENT}=") for choice in choices):
        raise ConfigError(_EXPERIMENT, "", f"say which one: {_EXPERIMENT}={'|'.join(groups[_EXPERIMENT])}")
    try:
        # The defaults are part of the tree, so that interpolations such as ${train.total_steps} resolve.
        defaults = Config().model_dump() if with_defaults else {}
        tree = OmegaConf.merge(defaults, _files(choices) if config_dir is None else _chosen(choices, config_dir))
        for key, value in read:
            if key not in groups:
                OmegaConf.update(tree, key, value, merge=True, force_add=True)
        return OmegaConf.to_container(tree, resolve=with_defaults, throw_on_missing=True)
    except OmegaConfBaseException as exc:
        raise ConfigError(exc.full_key or "override", "", _first_line(exc)) from None


def _chosen(choices: Sequence[str], config_dir: Path | None = None) -> DictConfig:
    """Let hydra merge the files of the chosen options. Raises ConfigError."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from yaml import YAMLError

    if config_dir is not None:
        # hydra reads only the head of a file for its section; an experiment must name it
        for file in sorted(config_dir.glob("*/*.yaml")):
            lines = file.read_text("utf-8", errors="replace").splitlines()
            said = [number for number, line in enumerate(lines) if _PACKAGE.match(line)]
            if said and not all(_HEAD.match(line) for line in lines[: said[0]]):
                problem = f"{lines[said[0]].strip()!r} is on line {said[0] + 1}: it must be on line 1"
                raise ConfigError("--config-dir", str(file), problem)
            if not said and file.parent.name == _EXPERIMENT:
                raise ConfigError("--config-dir", str(file), "must have '# @package _global_' on line 1")
    search = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            return hydra_compose(_ROOT, overrides=[*search, *choices])
        except HydraException as exc:
            raise ConfigError("override", " ".join(choices), _first_line(exc.__cause__ or exc)) from None
        except YAMLError as exc:
            raise ConfigError("configuration file", " ".join(choices), " ".join(str(exc).split())) from None


_files = functools.lru_cache(maxsize=64)(_chosen)  # the shipped ones: hydra takes 0.2 s, and each command asks twice


def config_groups(config_dir: Path | None) -> dict[str, list[str]]:
    """Return group -> options, shipped ones and the user's."""
    roots: list[Traversable] = [resources.files(CONFIG_MODULE)]
    if config_dir is not None:
        if not config_dir.is_dir():
            raise ConfigError("--config-dir", str(config_dir), "is not a directory")
        roots.append(config_dir)
    groups: dict[str, set[str]] = {}
    for folder in (folder for root in roots for folder in root.iterdir() if folder.is_dir()):
        options = {file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")}
        if options:
            groups.setdefault(folder.name, set()).update(options)
    return {group: sorted(options) for group, options in groups.items()}


def _read(text: str, groups: dict[str, list[str]]) -> tuple[str, Any]:
    """Return the key and the value of one override. The schema judges unknown fields. Raises ConfigError."""
    parsed = _parse(text)
    key, value = parsed.key_or_group, parsed.value()
    if not key:
        raise ConfigError("override", text, "names no field: write field=value")
    if key.partition("@")[0].partition(".")[0] == "hydra":
        raise ConfigError(key, value, "hydra's own settings do not apply here")
    if parsed.is_sweep_override():
        info = _field_info(key)
        if info is not None and info.annotation is str:  # actor.d2,critic.d1 is one text with a comma in it
            return key, text.partition("=")[2]
        problem = "takes one value only: a list is written [a,b]; realsys sweep runs a trial for each of a,b"
        raise ConfigError(key, parsed.get_value_string(), problem)
    if key in groups:
        if parsed.is_delete():
            raise ConfigError(key, "~", f"cannot be left out: use one of {', '.join(groups[key])}")
        if not isinstance(value, str) or value not in groups[key]:
            raise ConfigError(key, value, f"unknown; known: {', '.join(groups[key])}{did_you_mean(value, groups[key])}")
        return key, value
    if parsed.is_delete():
        raise ConfigError(key, "~", "a field cannot be deleted: set it to the value you want")
    return key, value


def _parse(text: str) -> Override:
    """Parse one override. A text that hydra cannot read, such as ``~/qwen``, is taken as it is.

    Raises ConfigError.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if "=" not in text and not text.startswith("~"):
        raise ConfigError(text, "", "cannot be read: write field=value")
    key, _, value = text.partition("=")
    info = _field_info(key.lstrip("+"))
    attempts = [text]
    if info is not None and info.annotation is str and "${" not in value:
        attempts.append(f"{key}={quoted(value)}")
    for attempt in attempts:
        try:
            return OverridesParser.create().parse_override(attempt)
        except HydraException:
            continue
    problem = "cannot be read: put a value with spaces or special characters in quotes: field=\"'...'\""
    if value.startswith("[") or (info is not None and get_origin(info.annotation) is list):
        problem = f"cannot be read: put each text of the list in quotes: {key}=\"['...','...']\""
    raise ConfigError(key, value, problem)


def quoted(value: str) -> str:
    """Write a text so that hydra reads it as text, whatever it contains."""
    # A backslash is one for hydra, except in a row before a quote: there each must be doubled.
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"


def given_fields(overrides: Sequence[str], *, config_dir: Path | None = None) -> set[str]:
    """Return the keys that the command line and the chosen files set. A section includes all of its fields.

    Raises ConfigError.
    """
    keys = {_parse(text).key_or_group for text in overrides}
    in_files = set(leaves(_merge(overrides, config_dir, with_defaults=False)))
    return {_CHOSEN_BY.get(key, key) for key in keys} | (in_files - set(_CHOSEN_BY.values()))


def leaves(tree: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of a tree's values."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}{name}.")
    elif prefix:
        yield prefix.removesuffix(".")


def _first_line(exc: BaseException) -> str:
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__


# ---- pydantic


def _path(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"] if part != "[key]")  # the error of a key ends with "[key]"


def _explain(error: ErrorDetails) -> tuple[str, object, str]:
    """Return (field, value, problem) of a pydantic error."""
    path, value = _path(error), error["input"]
    if now := present_name(path):
        return path, value, now
    if error["type"] == "extra_forbidden":
        for name, inner in value.items() if isinstance(value, dict) else ():
            if now := present_name(f"{path}.{name}"):  # its section is of an earlier build, too
                return f"{path}.{name}", inner, now
        return path, value, f"unknown field{_did_you_mean_field(path)}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return path, value, f"is a section: set one of its fields, e.g. {path}.{_first_field(path)}"
    return path, value, problem_of(path, error)


def _did_you_mean_field(path: str) -> str:
    """Suggest a field: the same name in another section, one described by that word, or a similar one."""
    known = list(fields(arguments=True))
    known += sorted({section for field in known if (section := field.rpartition(".")[0])})
    name = path.rpartition(".")[2]
    close = [k for k in known if name in (k.rpartition(".")[2], _description(k).partition(":")[0])]
    if not close:
        close = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
    if not close:
        matches = difflib.get_close_matches(name, [k.rpartition(".")[2] for k in known], n=1, cutoff=0.8)
        close = [k for k in known if matches and k.rpartition(".")[2] == matches[0]]
    close.sort(key=lambda k: k.count("."))  # fields of one name: the outermost section first
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def _field_info(path: str) -> FieldInfo | None:
    """Return the schema's field, or None if the path leaves the schema."""
    section: type[BaseModel] | None = Config
    info = None
    for part in path.split("."):
        if section is None or part not in section.model_fields:
            return None
        info = section.model_fields[part]
        section = _section_of(info.annotation)
    return info


def _description(path: str) -> str:
    info = _field_info(path)
    return (info.description or "") if info else ""


def _first_field(path: str) -> str:
    info = _field_info(path)
    section = _section_of(info.annotation) if info else None
    return next(iter(section.model_fields)) if section else "NAME"


def literal_choices(path: str) -> list[str]:
    """Return the values of a field that has a fixed set of them; else []."""
    info = _field_info(path)
    return [choice for choice in get_args(info.annotation) if isinstance(choice, str)] if info else []
