"""An OpenAI endpoint on loopback that judges by comparison, and misbehaves as a test says."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

from realsys.cluster.http_server import HttpServer

KEY = "sk-test-0123456789"
_JUDGED = re.compile(r"----- BEGIN ([0-9a-f]{16}) -----\n(.*)\n----- END \1 -----", re.DOTALL)
_REFERENCE = re.compile(r"Reference answer:\n(.*?)\n\nCompletion:", re.DOTALL)

#: fault -> (status, content of the verdict or body of the error, finish_reason)
FAULTS: dict[str, tuple[int, str, str]] = {
    "malformed": (200, "It is quite good, 8/10.", "stop"),
    "schema": (200, '{"reasoning": "", "scores": {"beauty": 1}}', "stop"),
    "truncated": (200, '{"reasoning": "a long', "length"),
    "nan": (200, '{"reasoning": "", "scores": {"correctness": NaN}}', "stop"),
    "range": (200, '{"reasoning": "", "scores": {"correctness": 7}}', "stop"),
    "429": (429, "slow down", ""),
    "500": (500, "a bug", ""),
    "503": (503, "overloaded", ""),
    "400": (400, "the context is too long", ""),
    "401": (401, f"Incorrect API key provided: {KEY}", ""),
    "404": (404, "no such model", ""),
}


@dataclass
class JudgeEndpoint:
    """The endpoint. ``faults``: what happens to the next requests; ``hang``: no reply until the caller has gone.

    ``score``: its score of correctness, from completion and reference.
    """

    faults: list[str] = field(default_factory=list)
    always: str = ""  # the fault of all further requests
    retry_after: str = ""
    score: Callable[[str, str], float] = lambda completion, reference: float(reference in completion)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    running: int = 0
    most: int = 0  # requests at a time
    left: int = 0  # requests whose caller has gone

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            self.times.append(time.monotonic())
            self.bodies.append(await request.json())
            self.keys.append(request.headers.get("authorization", ""))
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                return await self._reply(request, self.bodies[-1])
            finally:
                self.running -= 1

        return app

    async def _reply(self, request: Request, body: dict[str, Any]) -> Response:
        fault = self.faults.pop(0) if self.faults else self.always
        if fault == "hang":
            await request.receive()  # the end of the connection
            self.left += 1
            return Response(status_code=499)
        if fault:
            status, text, finish_reason = FAULTS[fault]
        else:
            status, text, finish_reason = 200, self._verdict(body), "stop"
        if status != 200:
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return Response(json.dumps({"error": {"message": text}}), status, headers)
        message = {"role": "assistant", "content": text}
        reply = {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}
        return Response(json.dumps(reply | {"usage": {"total_tokens": 100}}), 200)

    def _verdict(self, body: dict[str, Any]) -> str:
        text = body["messages"][1]["content"]
        judged, reference = _JUDGED.search(text), _REFERENCE.search(text)
        assert judged is not None
        score = self.score(judged[2], reference[1] if reference else "")
        return json.dumps({"reasoning": "compared", "scores": {"correctness": score}})


@contextmanager
def judge_endpoint(**fields: Any) -> Iterator[JudgeEndpoint]:
    """Serve an endpoint in a thread."""
    endpoint = JudgeEndpoint(**fields)
    server = HttpServer(endpoint.app())
    server.start()
    endpoint.url = f"{server.url}/v1"
    try:
        yield endpoint
    finally:
        server.close()
