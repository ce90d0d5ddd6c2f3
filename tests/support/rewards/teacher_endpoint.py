"""A teacher on loopback that speaks as vLLM or SGLang does, and misbehaves as a test says."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

from realsys.cluster.http_server import HttpServer

Scores = list[float | None]
#: fault -> status and body
FAULTS = {
    "503": (503, {"error": {"message": "overloaded"}}),
    "400": (400, {"error": {"message": "Token id 99999 is out of vocabulary"}}),
    "401": (401, {"error": {"message": "wrong key sk-teacher"}}),
    "html": (200, "<html>"),
    "none": (200, {"choices": [{"text": "x"}]}),  # a server that ignores prompt_logprobs
    "empty": (200, {"choices": []}),
    "huge": (200, {"choices": [], "x": "y" * (4 << 20)}),
}


@dataclass
class TeacherEndpoint:
    """``score``: log-prob of a token at a place; ``text``: its text. ``faults``: of the next requests, then ``always``.

    Asked for top tokens, it finds 0 and those after it most probable, each with half the probability of the one before.

    fault "few": the score of one token is left out; "nan", "positive": one is no log-prob; "hang": no reply.
    """

    score: Callable[[int, int], float] = lambda place, token: -0.25 * (token % 8) - 0.5
    text: Callable[[int], str | None] = lambda token: None
    last: int = -1  # last token of its vocabulary, which SGLang reports as 0
    faults: list[str] = field(default_factory=list)
    always: str = ""
    most: int = 20  # top tokens that it sends
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/completions")
        @app.post("/generate")
        async def complete(request: Request) -> Response:
            self.bodies.append(await request.json())
            self.keys.append(request.headers.get("authorization", ""))
            fault = self.faults.pop(0) if self.faults else self.always
            if fault == "hang":
                await request.receive()  # the end of the connection
            if fault in FAULTS:
                status, body = FAULTS[fault]
                return Response(body if isinstance(body, str) else json.dumps(body), status)
            return Response(json.dumps(self._scored(self.bodies[-1], fault)))

        return app

    def _scored(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        tokens = body.get("prompt") or body["input_ids"]
        scores: Scores = [None, *(self.score(place, token) for place, token in enumerate(tokens) if place)]
        scores[-1] = {"nan": None, "positive": 0.5}.get(fault, scores[-1])
        left = list(zip(tokens, scores, strict=True))[: -1 if fault == "few" else None]
        top = [
            (-0.7 * (token + 1), token)
            for token in range(body.get("top_logprobs_num", body.get("prompt_logprobs")) or 0)
        ]
        top = top[: self.most]
        if "prompt" in body:
            by_token = [
                value
                if value is None
                else {str(token): {"logprob": score} for score, token in top}
                | {str(token): {"logprob": value, "rank": 1, "decoded_token": self.text(token)}}
                for token, value in left
            ]
            return {"choices": [{"index": 0, "text": "", "prompt_logprobs": by_token}]}
        start = body["logprob_start_len"]
        entries: list[list[Any]] = [[value, token, self.text(token)] for token, value in left[start:]]
        entries[0][0] = None
        for entry in entries:
            if entry[1] == self.last:
                entry[1:] = [0, self.text(0)]
        tops = [None, *[[(value, token, None) for value, token in top] for _ in entries[1:]]]
        return {
            "text": "",
            "meta_info": {"input_token_logprobs": entries} | ({"input_top_logprobs": tops} if top else {}),
        }


@contextmanager
def teacher_endpoint(**fields: Any) -> Iterator[TeacherEndpoint]:
    """Serve a teacher in a thread."""
    endpoint = TeacherEndpoint(**fields)
    server = HttpServer(endpoint.app())
    server.start()
    endpoint.url = server.url
    try:
        yield endpoint
    finally:
        server.close()
