"""Program for an interpreter that has verifiers 0.4, but not realsys: list tasks, or serve an environment.

    python -P verifiers_program.py tasks '{"env": ..., "args": ..., "size": ...}'      one JSON object per line
    python -P verifiers_program.py serve '{"env": ..., "args": ..., "address": ..., "workers": ...}'

``env`` is the id of a taskset: the name of a module that exports one. ``args`` is the configuration of the environment,
as verifiers writes it below ``[env]``. The environment's own output goes to stderr.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any, TextIO

INFINITE_SIZE = 1000  # tasks that are listed of an endless taskset, without a size


def configuration(env: str, args: dict[str, Any]) -> Any:
    """Return the environment's configuration. Raises ValueError."""
    from verifiers.v1.utils.loaders import harness_class, resolve_env_config

    data = {**args, "taskset": {**args.get("taskset", {}), "id": env}}
    config = resolve_env_config(dict(data))
    # verifiers would start each harness in a sandbox of a cloud. Here it is a process, if it runs no code of the model.
    for role, harness in config.agent_harnesses().items():
        if getattr(config, role).runtime.type != "prime" or "runtime" in data.get(role, {}):
            continue
        if harness_class(harness.id).EXECUTES_CODE:
            raise ValueError(
                f"harness {harness.id!r} of {role} runs code of the model: set args.{role}.runtime.type to docker, or"
                f" to subprocess (without isolation), or args.{role}.harness.id to one that runs none, such as null"
            )
        data[role] = {**data.get(role, {}), "runtime": {"type": "subprocess"}}
    return resolve_env_config(data)


def list_tasks(env: str, args: dict[str, Any], size: int, out: TextIO) -> None:
    """Write the tasks of an environment. ``size``: limit of their number; 0: none."""
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(configuration(env, args).taskset)
    if not size and not taskset.bounded:
        size = INFINITE_SIZE
    for task in taskset.take(size) if size else taskset:
        prompt = task.data.prompt
        if prompt is not None and not isinstance(prompt, str):
            prompt = [message.model_dump(mode="json", exclude_none=True) for message in prompt]
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        line = {"prompt": prompt, "system": task.data.system_prompt, "name": task.data.name, "task": data}
        print(json.dumps(line), file=out, flush=True)


def serve(env: str, args: dict[str, Any], address: str, workers: int) -> None:
    """Serve an environment until SIGTERM."""
    from verifiers.v1.serve import serve_env

    config = configuration(env, args)
    serve_env(config=config, address=address, max_workers=workers, elastic=False, log_setup=log_warnings)


def log_warnings() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    command, given = sys.argv[1], json.loads(sys.argv[2])
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        try:
            if command == "tasks":
                list_tasks(given["env"], given["args"], given["size"], out)
            else:
                serve(given["env"], given["args"], given["address"], given["workers"])
        except Exception as error:  # the boundary of the process: one line for the worker
            sys.exit(" ".join(f"{type(error).__name__}: {error}".split()))


if __name__ == "__main__":
    main()
