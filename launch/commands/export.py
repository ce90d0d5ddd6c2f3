"""Write the weights of a trial as a Hugging Face directory that refers to nothing else.

They are those of the trained model, or of any step of which the trial has a weight version or a checkpoint. The trial
may be running.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from realsys.errors import CheckpointError, ConfigError, WeightsError
from realsys.launch.commands.options import add_trial, find_trial
from realsys.launch.evaluation_target import find_target, write_model
from realsys.launch.words import path_setting


def add_arguments(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write, which must not exist")
    parser.add_argument("--step", type=int, metavar="N", help="weights of this step (default: the last)")


def run(args: Namespace) -> int:
    """Write the model of a step, without one the trained model or the newest.

    Raises ConfigError if the trial has no weights of the step, if they are damaged, or if ``out`` exists; ModelError if
    the model that a checkpoint was trained from is not there any more.
    """
    target = find_target(str(find_trial(args.trial_dir).root), args.step)
    out = args.out.expanduser().resolve()
    if out.exists():
        raise ConfigError("OUT", str(out), "exists: name a new folder")
    source = f", from {target.model.name} of its checkpoints" if target.form == "checkpoint" else ""
    print(f"writing the weights of step {target.step} to {out}{source}", flush=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_model(target, out)
    except (WeightsError, CheckpointError, OSError) as error:
        raise ConfigError("OUT", str(out), f"{target.model} cannot be exported: {error}") from None
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{size / 2**20:,.1f} MiB; transformers loads it, and {path_setting('model.path', out)}")
    return 0
