"""Entry point. SGLang starts its scheduler by ``spawn``, which imports the main module again before anything else:
so every process of the server runs the top of this file before it imports SGLang.
"""

import runpy

from . import attention, kernels, pinned, vision

kernels.install()
vision.install()
attention.install()
pinned.install()

if __name__ == "__main__":
    # The main module stays this one, so that spawned processes import this one.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
