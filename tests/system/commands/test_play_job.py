"""`realsys play` with an engine, a gateway and verifiers that are real, and agents of a user."""

import textwrap

import pytest

from realsys.config.compose import compose
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.generation.backend import make_backend
from tests.support.jobs.jobs import realsys
from tests.support.serving.generation_servers import engine_parts, serving

pytestmark = pytest.mark.system

AGENT = """
async def run(data, base_url, http_client, wrong=False):
    body = {"model": "policy", "messages": [{"role": "user", "content": data["prompt"]}]}
    reply = await http_client.post(f"{base_url}/chat/completions", json=body)
    if wrong:
        return reply.json()["answer"]
    return {"reward": 0.5, "metrics": {"calls": 1}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained chat model."""
    folder, config = tmp_path_factory.mktemp("model"), compose(["experiment=arith_chat"])
    write_char_tokenizer(folder, chat=True)
    make_tiny_model(config.model.tiny, folder, seed=1)
    return folder


@pytest.fixture(autouse=True)
def agent(tmp_path, monkeypatch):
    (tmp_path / "played.py").write_text(textwrap.dedent(AGENT))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def test_agent_is_played_with_its_rows_and_reward(model):
    done = realsys("play", "experiment=arith_chat", f"model.path={model}", "rollout.agent=played:run", "--tasks", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n  sampled    ") == done.stdout.count("\n  row 0      ") == 2
    assert "  reward     0.5, " in done.stdout and "calls 1" in done.stdout
    assert done.stdout.endswith("2 played, 0 failed, mean reward 0.5\n")


def test_server_of_the_user_is_asked(model):
    words = ["experiment=arith_chat", f"model.path={model}", "rollout.agent=played:run", "--tasks", 1, "--server"]
    config = compose(["experiment=arith_chat", f"model.path={model}"])
    with serving(make_backend(config).build(engine_parts(config, model))) as url:
        done = realsys("play", *words, url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  sampled    " in done.stdout and done.stdout.endswith("1 played, 0 failed, mean reward 0.5\n")
    refused = realsys("play", *words, url)
    assert refused.returncode == 2
    assert f"--server='{url}': does not answer as a generation server: " in refused.stderr


def test_error_of_an_agent_has_its_line(model):
    words = ["experiment=arith_chat", "rollout.agent=played:run", "rollout.agent_args={wrong: true}", "--tasks", 1]
    done = realsys("play", model, *words)
    assert done.returncode == 1
    assert "  sampled    " in done.stdout, "the conversation before the error is shown"
    assert "AgentError: KeyError: 'answer' (" in done.stdout and "played.py:6)" in done.stdout
    assert done.stdout.endswith("1 played, 1 failed\n")
