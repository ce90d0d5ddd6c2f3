"""Backend that runs vLLM's own server in a child process: docs/generation.md#vllm."""
