"""Backend that runs SGLang's own server in a child process: docs/generation.md#sglang."""
