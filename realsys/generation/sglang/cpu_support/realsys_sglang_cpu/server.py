"""Entry point. SGLang starts its scheduler by ``spawn``, which imports the main module again before anything else:
so what stands at the top of this file is done in every process of the server, before SGLang is imported there.
"""

import runpy

from . import attention, kernels, vision

kernels.install()
vision.install()
attention.install()

if __name__ == "__main__":
    # The main module stays this one, so that spawned processes import this one.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
