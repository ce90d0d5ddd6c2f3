"""Picture of a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LINE, _BAR = "#1f5fa8", "#9dc3e6"


def draw_simulation(found: Mapping[str, Any], path: Path) -> None:
    """Draw wait per step, staleness, wasted tokens and waiting times of ``realsys.simulate.summary``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    wait, staleness, wasted, waits = axes.flat
    hours = [point["time"] / 3600 for point in found["curve"]]
    wait.plot(hours, [point["wait"] for point in found["curve"]], color=_LINE)
    wait.set_title("Wait for a batch (s) over hours")
    staleness.bar([int(lag) for lag in found["staleness"]], list(found["staleness"].values()), color=_BAR)
    staleness.set_title("Trained rows by staleness (versions)")
    shares = found["wasted"] or {"nothing": 0.0}
    wasted.barh(list(shares), [100 * share for share in shares.values()], color=_BAR)
    wasted.set_title("Wasted tokens (% of the sampled ones)")
    names = list(found["waits_s"])
    waits.bar(names, [found["waits_s"][name]["mean"] for name in names], color=_BAR, label="mean")
    waits.plot(names, [found["waits_s"][name]["p95"] for name in names], "o", color=_LINE, label="95 %")
    waits.legend(frameon=False, fontsize=9)
    waits.set_title("Waiting times (s)")
    for axis in axes.flat:
        axis.grid(True, color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{found['scenario']}: {found['servers']} servers, {found['workers']} workers", fontsize=12)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
