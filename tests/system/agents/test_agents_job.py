"""Whole jobs with agents: the built-in ones, and those of a user with base_url, where they run and when they fail."""

import sys
from pathlib import Path

import pytest

from tests.support.jobs.jobs import SMALL, command, processes_of, running
from tests.support.jobs.ledgers import check_ledger

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[3]
CHAT = [
    *(
        entry
        for entry in SMALL
        if not entry.startswith(("experiment=", "generation.embedded.context", "data.arith.max"))
    ),
    "data.arith.max_operands=2",
    "warmup.batch=16",
    "train.total_steps=2",
    "evaluation.problems=4",
]


SHORT = "rollout.agent_limits.episode_timeout_s=0.5"
TIMEOUT = f"it did not end within {SHORT}"
#: of a tool call, in a demonstration
ARGUMENTS = {"calculator": '"expression": "{expression}"', "python": '"code": "print({expression})"'}


def run_agent(folder, experiment, *overrides, env=None):
    root = folder / experiment / "agent"
    argv = command(f"experiment={experiment}", *CHAT, f"fileroot={folder}", "trial=agent", *overrides)
    with running(root, argv, env=env) as live:
        live.wait()
    return live.job


def trained(job):
    """Return the train steps of a job that came to its end and left no process."""
    job.completed()
    steps = job.records("train")
    assert [step["version"] for step in steps] == [1, 2]
    assert all(step["stats"]["grad_norm"] > 0 for step in steps)
    check_ledger(job, batch_groups=8, eta=4, prompts=400)
    assert not processes_of(job.root)
    return steps


def test_multi_turn_trains_on_two_tries(tmp_path):
    steps = trained(run_agent(tmp_path, "arith_multi_turn"))
    assert all(step["metrics"]["turns"] > 1.0 for step in steps)


@pytest.mark.parametrize("tool", ["calculator", pytest.param("python", marks=pytest.mark.needs("bwrap"))])
def test_tool_use_trains_on_calls_and_results(tmp_path, tool):
    """The demonstrations are calls only, so that few steps teach them; a low temperature keeps their syntax."""
    response = f'<tool_call>{{"name": "{tool}", "arguments": {{{ARGUMENTS[tool]}}}}}</tool_call>'
    prompt = "[{role: user, content: '{prompt}'}]"
    forms = f"data.arith.forms=[{{prompt: {prompt}, tools: [{tool}], response: '{response}'}}]"
    warm_up = ["warmup.steps=40", "generation.sampling.temperature=0.6", forms]
    steps = trained(run_agent(tmp_path, "arith_tools", *warm_up, f"rollout.agent_args.tools=[{tool}]"))
    assert all(step["metrics"]["turns"] > 1.0 for step in steps), "no completion after a result"
    assert any(step["metrics"]["tool_calls"] > step["metrics"]["tool_errors"] for step in steps)


def test_openai_client_trains_in_the_worker(tmp_path):
    env = {"PYTHONPATH": str(ROOT / "docs" / "examples")}
    agent = ["rollout.agent=captured_agent:run", "rollout.agent_args.wrong=-1.0"]
    steps = trained(run_agent(tmp_path, "arith_chat", *agent, env=env))
    assert all(step["metrics"]["tries"] > 1.0 for step in steps)


def test_plain_function_trains_in_its_own_interpreter(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    python = Path(sys.executable).resolve()
    agent = ["rollout.agent=plain:Plain", f"rollout.agent_python={python}", "rollout.agent_args.bonus=0.5"]
    steps = trained(run_agent(tmp_path, "arith_chat", *agent, env={"PYTHONPATH": str(tmp_path)}))
    assert all(step["metrics"]["outer"] == 1.0 for step in steps)


def test_tokens_are_trained_at_the_temperature_asked_for(tmp_path):
    """The weights do not change, so trainer and engine must agree on every token: two ranks, and a reference."""
    (tmp_path / "cool.py").write_text(COOL)
    settings = [
        "rollout.agent=cool:run",
        "rollout.gateway.sampling=request",
        "train.optimizer.lr=1e-30",
        "train.ppo.kl.coef=0.01",
        "allocation=sglang.d1+d2",
    ]
    for step in trained(run_agent(tmp_path, "arith_chat", *settings, env={"PYTHONPATH": str(tmp_path)})):
        assert step["metrics"]["gateway/asked_temperature"] == 0.5
        assert 0 < step["stats"]["inf/logprob_difference_max"] < 1e-4


@pytest.mark.parametrize(
    ("run", "settings", "cause"),
    [
        ("broken", [], "two tickets in a row failed with the same error: KeyError: 'level' ({folder}/failing.py:2"),
        ("hangs", ["rollout.group_size=1", "evaluation.problems=0", SHORT], f"128 of them: {TIMEOUT}"),
    ],
    ids=["defect", "timeout"],
)
def test_agent_that_always_fails_ends_the_run(tmp_path, run, settings, cause):
    (tmp_path / "failing.py").write_text(FAILING)
    settings = [f"rollout.agent=failing:{run}", "rollout.workers=1", "warmup.steps=2", *settings]
    job = run_agent(tmp_path, "arith_chat", *settings, env={"PYTHONPATH": str(tmp_path)})
    assert job.returncode not in (0, None)
    assert "StuckError" in job.stderr and cause.format(folder=tmp_path) in job.stderr


#: standard library only; None: the environment judges the last completion
PLAIN = """
import json, sys, urllib.request

class Plain:
    def __init__(self, bonus):
        self.bonus = bonus

    def run(self, data, base_url, api_key):
        body = {"model": "policy", "messages": [{"role": "user", "content": data["prompt"]}]}
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        return {"metrics": {"outer": int(sys.prefix == sys.base_prefix), "characters": len(text)}}
"""

COOL = """
import openai

async def run(data, base_url, api_key, http_client):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = [{"role": "user", "content": data["prompt"]}]
    await client.chat.completions.create(model="policy", messages=messages, temperature=0.5)
"""

FAILING = """async def broken(data, base_url):
    return data["level"]

async def hangs(data, base_url):
    import asyncio
    await asyncio.Event().wait()
"""
