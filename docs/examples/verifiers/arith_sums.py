"""An environment of verifiers: running sums, written as in `experiment=arith_chat` ("a3b5=" -> "a0+3=3;b3+5=8;#8").

    make verifiers-env
    PYTHONPATH=docs/examples/verifiers realsys run experiment=arith_verifiers

One file is a whole environment: data of a task, its reward, the set of tasks, and a harness that talks to the model. A
harness of verifiers, such as `null`, would do as well; this one saves a process per episode.
"""

import random

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.rpartition("#")[2] == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    tasks: int = 200
    most: int = 3
    largest: int = 9
    seed: int = 0


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        numbers = random.Random(self.config.seed)
        for _ in range(self.config.tasks):
            terms = [numbers.randint(0, self.config.largest) for _ in range(numbers.randint(2, self.config.most))]
            prompt = "".join(f"{label}{term}" for label, term in zip("abcdefghij", terms, strict=False)) + "="
            yield SumTask(SumData(prompt=prompt, answer=str(sum(terms))), self.config.task)


class OneQuestion(vf.Harness[vf.HarnessConfig]):
    """Harness that sends the prompt once, in the process of the environment server."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs):
        _, prompt = self.resolve_prompt(data)
        body = {"model": ctx.model, "messages": [{"role": "user", "content": prompt}]}
        async with httpx.AsyncClient(timeout=None) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return ProgramResult(exit_code=reply.is_error, stdout="", stderr=reply.text if reply.is_error else "")


__all__ = ["OneQuestion", "SumTaskset"]
