"""SGLang on a CPU: stand-ins for what is not there, and attention that decodes a batch at once.

    python -m realsys_sglang_cpu.server --model-path ...     in place of     python -m sglang.launch_server

What is installed for real is used: a stand-in is only found where nothing else is.
"""
