"""SGLang on a CPU: stand-ins for missing packages, and attention that decodes a whole batch in one call.

    python -m realsys_sglang_cpu.server --model-path ...     in place of     python -m sglang.launch_server

An installed package is used; a stand-in is found only if the package is missing.
"""
