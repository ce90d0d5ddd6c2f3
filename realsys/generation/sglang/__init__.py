"""SGLang's own server as a backend: a child process that is started, watched and updated from here (docs/sglang.md)."""
