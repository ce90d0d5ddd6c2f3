"""realsys: asynchronous reinforcement learning for language models (the AReaL design, arXiv 2505.24298)."""

__version__ = "0.1.0"
