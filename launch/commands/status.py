"""`realsys status`: shows a trial from its folder and, while it runs, from its manager."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from rich.console import Console

from realsys.config.dump import newest_dump, read_config
from realsys.config.paths import TrialPaths
from realsys.errors import ConfigError
from realsys.launch.screen.display import PlainView
from realsys.launch.screen.progress import Progress
from realsys.launch.screen.report import print_summary
from realsys.telemetry.steps import StepTail

_DEFAULT_ROOT = "runs"


def show_status(trial_dir: Path | None) -> int:
    """Print the state of a trial; without a folder, of the newest one under runs/. Raises ConfigError."""
    paths = TrialPaths((trial_dir or newest_trial(Path(_DEFAULT_ROOT))).resolve())
    config = read_config(paths.config)
    console = Console()
    if paths.summary.is_file():
        try:
            print_summary(console, json.loads(paths.summary.read_text("utf-8")))
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            problem = f"cannot be read ({type(exc).__name__}: {exc}): remove it to see the step log instead"
            raise ConfigError("summary.json", str(paths.summary), problem) from None
        return 0
    from realsys.launch.screen.monitor import look_once

    progress = Progress()
    asyncio.run(look_once(config, paths, progress))
    done, total = progress.step
    since = "" if progress.phase_since is None else f" for {time.time() - progress.phase_since:.0f} s"
    state = f"phase {progress.phase}{since}, step {done}/{total}"
    if progress.address is None:
        state += "; no manager answers: the run is starting, or was killed"
    console.print(f"{config.experiment}/{config.trial}: {state}", highlight=False, soft_wrap=True)
    PlainView(console).refresh(progress, StepTail(paths.steps).records())
    return 0


def newest_trial(root: Path) -> Path:
    """Return the folder of the trial that was started last. Raises ConfigError if ``root`` has no trial."""
    newest = newest_dump(root)
    if newest is None:
        raise ConfigError("TRIAL_DIR", str(root), "has no trial: name the folder of a trial")
    return newest.parent
