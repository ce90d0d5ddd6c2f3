"""OpenEnv's validator of inference endpoints judges the gateway, from an interpreter of its own."""

import asyncio
import json

import pytest

from realsys.data.tokenizer import TextTokenizer
from tests.support.agents.interpreters import interpreter_of
from tests.support.serving.gateways import Scripted, chat_server, make_sharp_chat_model, opened, over_server

VALIDATE = """
import dataclasses, json, sys
from openenv.core.harness.capture.validate_llm import validate_llm
url, key, provider = sys.argv[1:]
print(json.dumps(dataclasses.asdict(validate_llm(url, "policy", provider=provider, api_key=key, timeout=60))))
"""
SAMPLING = "rollout.gateway.sampling=request"
LONG = "generation.sampling.max_new_tokens=96"  # room for a tool call


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory):
    """A model whose log-probs differ at the two temperatures that the validator asks for."""
    return make_sharp_chat_model(tmp_path_factory.mktemp("model"))


async def report(episode, provider):
    command = [interpreter_of(".venv-openenv"), "-c", VALIDATE, episode.session.base_url, episode.session.api_key]
    process = await asyncio.create_subprocess_exec(*command, provider, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return json.loads(out)


@pytest.mark.parametrize("provider", ["openai", "vllm"])
def test_endpoint_is_trainable(sharp_model, provider):
    """Token ids, aligned log-probs of the sampling distribution, models; no parameter had to be dropped."""

    async def run(url):
        async with over_server(url, TextTokenizer(sharp_model), SAMPLING) as episode:
            return await report(episode, provider), episode.engine.returned[0]

    with chat_server(sharp_model) as url:
        found, (tokens, completion) = asyncio.run(run(url))
    assert found["ok"] and found["capture_level"] == "tokens" and found["logprobs_mode"] == "processed"
    assert found["served_models"] == ["policy"] and not found["param_fixes"]
    assert not [line for line in found["findings"] if "FATAL" in line]
    assert (found["n_prompt_ids"], found["n_completion_ids"]) == (len(tokens), len(completion.tokens))


def test_overridden_temperature_looks_like_raw_logprobs(sharp_model):
    """The default samples both probes at the trial's temperature: their log-probs are equal, and those sampled from."""

    async def run(url):
        async with over_server(url, TextTokenizer(sharp_model)) as episode:
            found = await report(episode, "openai")
            return found, {call.spec.temperature for call in episode.engine.calls}

    with chat_server(sharp_model) as url:
        found, temperatures = asyncio.run(run(url))
    assert (found["capture_level"], found["logprobs_mode"], temperatures) == ("logprobs", "raw", {1.0})
    fatal = [line for line in found["findings"] if "FATAL" in line]
    assert len(fatal) == 1 and "raw_logprobs" in fatal[0]


@pytest.mark.parametrize(
    ("provider", "call"),
    [
        ("openai", '{"name": "bash", "arguments": {"command": "ls /tmp"}}'),
        ("anthropic", '{"name": "report_ok", "arguments": {"value": "ok"}}'),
    ],
)
def test_endpoint_calls_tools(sharp_model, provider, call):
    tokenizer = TextTokenizer(sharp_model)

    async def run():
        async with opened(Scripted(tokenizer, [f"<tool_call>{call}</tool_call>"]), tokenizer, LONG) as episode:
            return await report(episode, provider)

    found = asyncio.run(run())
    assert found["reachable"] and found["tool_support"] == "ok" and not found["param_fixes"]
