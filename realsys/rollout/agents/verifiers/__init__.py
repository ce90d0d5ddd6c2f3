"""The agent ``verifiers``: environments of that package, played by its environment server.

RolloutWorker                                            interpreter of verifiers (``env_python``)
  agent ──task, base_url──> server ──ZMQ, ipc──> environment server ──> harness, tools, reward
    ^                        └─ guard, restarts             │
    │ rows                                                  v
  gateway <──/chat/completions or /inference/v1/generate── model calls
"""
