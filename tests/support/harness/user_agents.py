"""Agents of users, good and bad. Standard library only, because they run in any interpreter."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

_SLEEPER = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid(), flush=True)"


class Rewarding:
    """An async agent with a constructor."""

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, http_client: Any) -> dict[str, Any]:
        print("prompt", data["prompt"])
        answer = f"{base_url} {api_key} {type(http_client).__name__} {os.getpid()}"
        return {"reward": self.reward, "correct": True, "metrics": {"level": data["level"]}, "answer": answer}


class Native:
    def __init__(self, parts: Any) -> None:
        self.parts = parts

    async def run(self, task: Any, session: Any) -> None: ...


async def client_of(data: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    return {"reward": 0, "answer": str(id(http_client))}


def blocks(data: dict[str, Any], base_url: str) -> None:
    """Plain code that never ends, and ignores SIGTERM. It leaves its number in the file that the row names."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _note(data, os.getpid())
    while True:
        time.sleep(1000)


def leaves_daemon(data: dict[str, Any], base_url: str) -> float:
    """Start a process in a session of its own, whose parent ends, and which ignores SIGTERM."""
    program = f"{_SLEEPER}; time.sleep(1000)"
    starter = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}], start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        _note(data, int(started.stdout.readline()))
    return 1.0


def eats(data: dict[str, Any], base_url: str) -> None:
    kept = []
    while True:
        kept.append(bytearray(10 << 20))


def eats_together(data: dict[str, Any], base_url: str) -> None:
    """Many processes, each within its own bound."""
    for _ in range(16):
        if os.fork() == 0:
            kept = bytearray(60 << 20)
            time.sleep(1000)
            print(len(kept))
    time.sleep(1000)


def forks(data: dict[str, Any], base_url: str) -> None:
    for _ in range(100):
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
    time.sleep(1000)


def waits(data: dict[str, Any], base_url: str) -> None:
    data["stop"].wait()


def takes_time(data: dict[str, Any], base_url: str) -> float:
    """Advance the clock of the row."""
    data["clock"].now_s += 0.2
    return 1.0


def prints(data: dict[str, Any], base_url: str) -> float:
    for _ in range(1000):
        print("x" * 10_000)
    print("the last line")
    return 2.0


def prints_and_raises(data: dict[str, Any], base_url: str) -> None:
    print("before the error", file=sys.stderr)
    raise KeyError("nothing")  # this line is in the message


def exits(data: dict[str, Any], base_url: str) -> None:
    os._exit(3)


def returns_object(data: dict[str, Any], base_url: str) -> object:
    return object()


def returns_megabytes(data: dict[str, Any], base_url: str) -> dict[str, str]:
    return {"answer": "x" * (2 << 20)}


async def loops(data: dict[str, Any], base_url: str) -> None:
    while True:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def sleeps_in_async(data: dict[str, Any], base_url: str) -> float:
    """Block the event loop, for as long as the row says."""
    time.sleep(data["s"])  # noqa: ASYNC251
    return 1.0


async def sleeps_in_a_task(data: dict[str, Any], base_url: str) -> float:
    (reward,) = await asyncio.gather(sleeps_in_async(data, base_url))
    return reward


async def catches_cancellation(data: dict[str, Any], base_url: str) -> None:
    """Go on after the first cancellation, for as long as the event of the row is not set."""
    while not data["stop"].is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue


def thread_of(data: dict[str, Any], base_url: str, http_client: Any) -> dict[str, Any]:
    thread = threading.current_thread()
    return {"reward": 0, "answer": thread.name, "metrics": {"daemon": thread.daemon}}


def _note(data: dict[str, Any], pid: int) -> None:
    with open(f"{data['file']}.new", "w") as file:
        file.write(str(pid))
    os.replace(f"{data['file']}.new", data["file"])
