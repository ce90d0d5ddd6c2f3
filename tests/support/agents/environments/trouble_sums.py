"""The sums of docs/examples/verifiers with a second agent and with trouble on demand. verifiers imports this file."""

import asyncio
import os

import verifiers.v1 as vf
from arith_sums import OneQuestion, SumConfig, SumData, SumTask, SumTaskset


class TroubleConfig(SumConfig):
    trouble: str = ""


class TroubleData(SumData):
    trouble: str = ""


class TroubleTask(SumTask, vf.Task[TroubleData]):
    def hooks(self, attr):
        return [] if attr == "reward" and self.data.trouble == "no_reward" else super().hooks(attr)

    @vf.reward(weight=0.5)
    async def half(self, trace: vf.Trace) -> float:
        if self.data.trouble == "bad_reward":
            raise ValueError("the judge is ill")
        return 1.0


class TroubleTaskset(SumTaskset, vf.Taskset[TroubleTask, TroubleConfig]):
    def load(self):
        if self.config.trouble == "no_tasks":
            raise OSError("the data set is gone")
        for task in super().load():
            data = task.data.model_dump(exclude_none=True)
            yield TroubleTask(TroubleData(**data, trouble=self.config.trouble), self.config.task)


async def never():
    """Wait until the episode is cancelled, and leave a sign of it."""
    try:
        await asyncio.Event().wait()
    finally:
        os.close(os.open(os.environ.get("TROUBLE_CANCELLED", os.devnull), os.O_CREAT | os.O_WRONLY))


class TroubleHarness(OneQuestion):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs):
        result = await super().launch(ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs)
        if data.trouble == "stuck":
            await never()
        if data.trouble == "dies":
            print("out of luck", flush=True)
            os._exit(3)
        return result


class Roles(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class TroubleEnv(vf.Env[Roles]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        await agents.solver.run(task)
        if task.data.trouble == "judge":
            await agents.judge.run(task)


__all__ = ["TroubleEnv", "TroubleHarness", "TroubleTaskset"]
