"""A small program that answers like SGLang's server, for the tests of the code that starts, watches and updates one.

Not a model: it counts. The token after t is (t + 1) % 90, with log-prob -1 - version / 100. A request with temperature
0.5 stalls half-way with the initial weights: it returns its tokens when it is aborted. Token 89 as the
last of a prompt ends the process, 88 makes it hang while it still listens. Version 13 never answers the prompt [0].
It has no update sessions. With --idle a connection is closed when it is used a second time. With --lingers a request
is at work for a while after its answer, and a load at that time ends the process, as it does SGLang. So does a load
without memory.
Usage: sglang_stand_in.py [--fail | --silent | --reports] [--loads] [--idle] [--lingers] --port PORT
"""

import argparse
import functools
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class State:
    def __init__(self, reports: bool) -> None:
        self.reports, self.version = reports, "default"
        self.lingers = 0  # refusals of /flush_cache until no request is at work
        self.aborted: set[str] = set()
        self.hangs = False
        self.released = False  # its memory
        self.changed = threading.Condition()


class Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"
    loads: mmap.mmap
    used = False
    idle = False
    lingers = False

    def handle_one_request(self) -> None:
        if not self.used:
            super().handle_one_request()
            self.used = True
        else:  # as if the connection had just been idle for too long
            self.rfile.readline()
            self.close_connection = True

    def do_GET(self) -> None:
        if self.path.startswith("/v1/loads"):  # while it is paused, SGLang's own report is from before, too
            self._reply({"loads": [{"num_used_tokens": 6, "max_total_num_tokens": 100}]})
        else:
            samples = self.path == "/health_generate" and not self.state.hangs
            self._reply({}, 200 if self.path == "/health" or samples else 503)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        with state.changed:
            if self.path == "/generate":
                jobs = zip(body["rid"], body["input_ids"], body["sampling_params"], strict=True)
                if streams := body.get("stream", False):
                    self._head(200, "Transfer-Encoding", "chunked")
                answers = [
                    self._generate(*job, functools.partial(self._event, index) if streams else None)
                    for index, job in enumerate(jobs)
                ]
                state.lingers = 2 if self.lingers else 0
                if streams:
                    self._chunk(b"")
                else:
                    self._reply(answers)
            elif self.path == "/abort_request":
                state.aborted |= {"all"} if body.get("abort_all") else {body["rid"]}
                state.changed.notify_all()
                self._reply({})
            elif self.path == "/flush_cache":
                self._reply({}, 400 if state.lingers else 200)
                state.lingers = max(0, state.lingers - 1)
            elif self.path == "/update_weights_from_disk":
                if state.lingers or state.released:
                    print("AssertionError: Cache flush failed after updating weights", flush=True)
                    os._exit(1)
                if (Path(body["model_path"]) / "deadly").exists():
                    print("loading, and killed", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                good = not (Path(body["model_path"]) / "broken").exists()
                state.version = body["weight_version"] if good else state.version
                print(f"load {state.version}", flush=True)
                self._reply({"success": good, "message": "as asked" if good else "cannot load"}, 200 if good else 400)
            elif self.path in ("/release_memory_occupation", "/resume_memory_occupation"):
                state.released = self.path.startswith("/release")
                print("released" if state.released else "resumed", flush=True)
                self._reply({})
            elif self.path == "/update_weight_version":
                state.version = body["new_version"]
                self._reply({}, 400 if body["abort_all_requests"] else 200)
            else:
                self._reply({}, 404 if self.path == "/begin_weight_update" else 200)

    def _event(self, index: int, answer: dict) -> None:
        self._chunk(b"data: " + json.dumps({**answer, "index": index}).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _generate(self, rid: str, prompt: list[int], params: dict, event: Callable[[dict], None] | None) -> dict:
        state, count = self.state, params["max_new_tokens"]
        if prompt[-1] == 89:
            print("token 89: the end", flush=True)
            os._exit(3)
        state.hangs |= prompt[-1] == 88
        if state.hangs or (prompt == [0] and state.version == "13"):
            state.changed.wait_for(lambda: False, timeout=600)
        stalls = params.get("temperature") == 0.5 and state.version == "default"
        count = count // 2 if stalls else count
        tokens = [(prompt[-1] + 1 + i) % 90 for i in range(count)]
        logprob = -1.0 if state.version == "default" else -1 - int(state.version) / 100
        sent = 0
        for end in range(1, count + 1 if event else 1, params.get("stream_interval", 1)):
            meta = {"finish_reason": None, "completion_tokens": end}
            meta["output_token_logprobs"] = [[logprob, token, None] for token in tokens[sent:end]]
            event({"output_ids": tokens[sent:end], "meta_info": meta})
            sent = end
        if stalls:
            state.aborted.clear()
            state.changed.wait_for(lambda: {"all", rid} & state.aborted, timeout=600)
        meta = {
            "id": rid,
            "finish_reason": {"type": "abort", "message": "asked to"}
            if stalls
            else {"type": "length", "length": count},
            "output_token_logprobs": [[logprob, token, None] for token in tokens],
            "weight_version": state.version,
        }
        if state.reports:
            meta["weight_versions"] = [{"version": state.version, "start": 0, "end": count}]
        answer = {"output_ids": tokens, "meta_info": {**meta, "completion_tokens": count}}
        if event:  # as SGLang ends a request that waits: one token again, and all log-probs
            event({**answer, "output_ids": tokens[max(0, sent - 1) :]})
        return answer

    def _reply(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self._head(status, "Content-Length", str(len(data)))
        self.wfile.write(data)

    def _head(self, status: int, name: str, value: str) -> None:
        self.send_response(status)
        self.send_header(name, value)
        if not self.idle:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    for mode in ("fail", "silent", "reports", "loads", "idle", "lingers"):
        parser.add_argument(f"--{mode}", action="store_true")
    arguments = parser.parse_args()
    print(f"serving on {arguments.port}", flush=True)
    if arguments.fail:
        print("RuntimeError: no such model", file=sys.stderr, flush=True)
        sys.exit(9)
    # Like SGLang, start a child process in a new session: it stays unless the guard kills it.
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    tempfile.mkstemp()  # and leave files where temporary ones go
    if arguments.loads:
        with Path(f"/dev/shm/sglang_loads_{os.getpid()}.shm").open("w+b") as file:
            file.truncate(1024)
            Handler.loads = mmap.mmap(file.fileno(), 1024)
    print(f"helper {sleeper.pid}", flush=True)
    if arguments.silent:
        threading.Event().wait(600)
    Handler.state, Handler.idle, Handler.lingers = State(arguments.reports), arguments.idle, arguments.lingers
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
