"""Run stages of training one after another on this machine; each starts from the models of those before it.

A FILE has the settings of one stage: keys of the configuration and `experiment: NAME`, as on the command line of
`realsys run`. All stages are checked before the first one starts. The same command with the same --trial continues.

    FILE ──> settings <── model.path, roles.reward.path of earlier stages ──realsys.launch.run──> trials NAME-1, NAME-2
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import yaml

from realsys.config.allocation import AUTO
from realsys.config.compose import compose, config_groups, leaves, quoted
from realsys.config.dataflow import REWARD_MODEL
from realsys.config.evaluation_sets import DEMOS, id_of_set
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.config.schema_data import HELD_OUT
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.errors import ConfigError
from realsys.launch.commands.options import add_while_stdin, preload_workers, stop_after_stdin
from realsys.launch.launchers.contract import check_start
from realsys.launch.prepare import complete_start, differences, examine
from realsys.launch.run import Planned, RunOptions, errors_name, plan_run, run_planned
from realsys.launch.words import command_line
from realsys.observe.screen.text_figures import aligned, fmt
from realsys.observe.step_log import surviving_steps

_MODEL, _REWARD, _WARMUP = "model.path", "roles.reward.path", "warmup.steps"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. ``words``: overrides of `realsys run`. ``own``: fields that its file or the command line sets."""

    number: int
    file: str
    words: Sequence[str]
    own: frozenset[str]

    def __str__(self) -> str:
        return f"stage {self.number}, {self.file}"


@dataclass(frozen=True, slots=True)
class Model:
    """Model that a stage makes, at ``path``. ``shape``: one with the same shape that is there before."""

    path: Path
    shape: Path
    rewards: bool

    @property
    def known(self) -> Path:
        return self.path if self.path.is_dir() else self.shape


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="+", metavar="WORD", help="FILE.yaml of a stage, or field=value for all")
    parser.add_argument("--trial", metavar="NAME", help="begin of the names of the trials (default: date and time)")
    parser.add_argument("--dry-run", action="store_true", help="check all stages, list them, start nothing")
    parser.add_argument("--plain", action="store_true", help="one line per step instead of the live display")
    add_while_stdin(parser)


def run(args: Namespace) -> int:
    """Run all stages that are not complete. Returns the exit code. Raises RealsysError for bad input."""
    preload_workers(args)
    stop_after_stdin(args)
    name = args.trial or f"{datetime.now():%Y%m%d-%H%M%S}"
    with tempfile.TemporaryDirectory(prefix="realsys-") as scratch:
        stages = read_stages(args.overrides, Path(scratch))
        options = RunOptions(name, Path(scratch), args.dry_run, args.plain)
        rows = list(_check(stages, options, Path(scratch)))
        for line in aligned(rows):
            print(line, flush=True)
        if args.dry_run:
            return 0
        words = [*args.overrides, "--trial", name, *(["--plain"] if args.plain else [])]
        return _run(stages, options, command_line("chain", *words))


def _run(stages: Sequence[Stage], options: RunOptions, again: str) -> int:
    models: list[Model] = []
    for stage in stages:
        with errors_name(str(stage)):
            planned = _plan(stage, models, options)
            config, paths = planned.config, planned.paths
            complete = complete_start(config, paths)
            if complete is None:
                print(f"\n{stage}: trial {config.experiment}/{config.trial}", flush=True)
                if code := run_planned(planned, dry_run=False, plain=options.plain, again=again):
                    return code
        print(f"{stage}: {gain(paths)}{' (complete already)' if complete else ''}", flush=True)
        models.append(Model(paths.final_model, paths.final_model, _rewards(config)))
    return 0


def _check(stages: Sequence[Stage], options: RunOptions, scratch: Path) -> Iterator[list[str]]:
    """Check what can be known of every stage before the first one starts. Yields a row about each.

    In the place of a language model that is to come stands the one that it is made of; a reward model is left out.
    """
    models: list[Model] = []
    for stage in stages:
        with errors_name(str(stage)):
            planned = _plan(stage, models, options)
            config, paths = planned.config, planned.paths
            check_start(config)
            if complete := complete_start(config, paths):
                state = "; ".join(["complete already", *differences(complete)])
            else:
                start = examine(config, paths, other_disk=config.cluster.nodes > 0).start
                state = f"continues at step {max(0, start.step)}" if paths.config.exists() else "new"
            shape = Path(config.model.path)
            if not config.model.path:
                shape = scratch / f"model-{stage.number}"
                write_char_tokenizer(shape, chat=config.model.tiny.chat)
                make_tiny_model(config.model.tiny, shape, seed=config.seed)
            models.append(Model(paths.final_model, shape, _rewards(config)))
        yield [str(stage), f"{config.experiment}/{config.trial}", state]


def _rewards(config: Config) -> bool:
    return config.train.ppo.algorithm == REWARD_MODEL


def _plan(stage: Stage, models: Sequence[Model], options: RunOptions) -> Planned:
    """Compose and plan a stage that starts from ``models``, the ones of the stages before it. Raises RealsysError."""
    config = compose(stage.words, config_dir=options.config_dir)
    language, rewards = ([model for model in models if model.rewards == kind] for kind in (False, True))
    words = list(stage.words)
    if language and _MODEL not in stage.own:
        if _WARMUP in stage.own and config.warmup.steps:
            problem = "the model of an earlier stage needs no warm-up: leave it out, or set it in the first FILE alone"
            raise ConfigError(_WARMUP, config.warmup.steps, problem)
        words += [f"{_MODEL}={quoted(str(language[-1].known))}", f"{_WARMUP}=0"]
    if rewards and config.train.ppo.reward_model_weight and _REWARD not in stage.own:
        path = rewards[-1].path
        # Without the model its weight is 0 in the check, and then the verifier's rewards may not be equal.
        unknown = ["train.ppo.reward_model_weight=0", "rollout.reward.correct=1", "rollout.reward.wrong=0"]
        words += [f"{_REWARD}={quoted(str(path))}"] if path.is_dir() else unknown
        if not path.is_dir() and "reward." in config.allocation:  # a role that no call needs then
            words.append(f"allocation={AUTO}")
    return plan_run(words, replace(options, trial=f"{options.trial}-{stage.number}"))


def gain(paths: TrialPaths) -> str:
    """Return what a stage has gained on held-out problems, or else on held-out rows, as text."""
    evaluations = {r["eval_id"]: r for r in surviving_steps(paths.steps) if r["kind"] == "eval"}
    for name, fields in ((HELD_OUT, {"accuracy": ".1%"}), (DEMOS, {"loss": ".3f", "accuracy": ".1%"})):
        before, after = (evaluations.get(id_of_set(when, name), {}) for when in ("before", "after"))
        found = [
            f"{field} {fmt(before.get(field), spec)} -> {fmt(after[field], spec)}"
            for field, spec in fields.items()
            if after.get(field) is not None
        ]
        if found:
            return f"held-out {', '.join(found)}"
    return "done"


# ---- files of stages


def read_stages(words: Sequence[str], folder: Path) -> list[Stage]:
    """Return the stages of the files in ``words``; the other words are settings of all stages. Raises ConfigError.

    ``model.path`` among them is the model of the first stage. The files become experiments in ``folder``.
    """
    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not files:
        raise ConfigError("FILE", "", "name the files of the stages: realsys chain sft.yaml ppo.yaml")
    for text in overrides:
        if (field := text.partition("=")[0].lstrip("+")) in ("experiment", "trial", "resume", "recover"):
            raise ConfigError(field, text.partition("=")[2], "cannot be the same for all stages: leave it out")
    (folder / "experiment").mkdir()
    stages = []
    for number, file in enumerate(files, 1):
        with errors_name(f"stage {number}"):
            own, chosen = _write_experiment(Path(file), folder / "experiment" / f"stage-{number}.yaml")
        shared = [text for text in overrides if number == 1 or not text.startswith(f"{_MODEL}=")]
        own |= {text.partition("=")[0].lstrip("+") for text in shared}
        stages.append(Stage(number, file, [f"experiment=stage-{number}", *chosen, *shared], frozenset(own)))
    return stages


def _write_experiment(file: Path, target: Path) -> tuple[set[str], list[str]]:
    """Write a file as an experiment of hydra. Returns the fields that it sets, and the options of other groups.

    Raises ConfigError.
    """
    try:
        text = file.read_text("utf-8")
        tree = yaml.safe_load(text)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError("FILE", str(file), f"cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError("FILE", str(file), "must have settings, such as `experiment: sft`")
    chosen: dict[str, str] = {}
    if "defaults" not in tree:
        chosen = {name: tree.pop(name) for name in config_groups(None) if isinstance(tree.get(name), str)}
        experiment = [f"/experiment/{chosen.pop('experiment')}"] if "experiment" in chosen else []
        text = yaml.safe_dump({"defaults": [*experiment, "_self_"], **tree}, sort_keys=False)
    target.write_text(text if text.startswith("# @package") else f"# @package _global_\n{text}", "utf-8")
    return set(leaves(tree)), [f"{name}={option}" for name, option in chosen.items()]
