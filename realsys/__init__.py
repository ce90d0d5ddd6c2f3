"""realsys: asynchronous reinforcement learning for language models (the AReaL design, arXiv 2505.24298).

`realsys.run`, `realsys.main`, `realsys.Trial` and `realsys.Session` drive and read runs from Python (realsys.api).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realsys.api import Session, Trial, main, run

__all__ = ["Session", "Trial", "__version__", "main", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the API when it is used first: every process imports this package."""
    if name in ("Session", "Trial", "main", "run"):
        from realsys import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
