"""The gateway without a request: when its server starts, and what it refuses before a run starts."""

import asyncio
import socket

import pytest

from realsys.errors import ConfigError, RealsysError
from realsys.rollout.gateway.gateway import check, gateway_of
from tests.support.gateway.tokenizers_of_formats import byte_tokenizer
from tests.support.processes.config_trees import changed


class Session:
    sampled = 0


def test_server_starts_with_the_first_address(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, [])

    async def body():
        gateway = gateway_of(changed(), tokenizer)
        assert gateway.counts() == dict.fromkeys(gateway.counts(), 0)
        await gateway.close()  # it has no server
        first, second = gateway.open(Session()), gateway.open(Session())
        assert first.base_url != second.base_url and first.base_url.endswith(f"/e/{first.api_key}/v1")
        await gateway.close()
        assert first.closed == second.closed == "the RolloutWorker stops"

    asyncio.run(body())


def test_taken_port_ends_the_worker_at_its_start(tmp_path):
    async def body(port):
        gateway_of(changed(f"rollout.gateway.port={port - 1}"), byte_tokenizer(tmp_path, []), index=1)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RealsysError, match="cannot bind"):
            asyncio.run(body(taken.getsockname()[1]))


def test_unknown_tool_format_is_refused(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, [])
    check(changed(), tokenizer)
    with pytest.raises(ConfigError, match="choose one of auto, none"):
        check(changed("rollout.gateway.tool_format=mine"), tokenizer)


def test_format_of_the_template_is_built_before_a_run(tmp_path, monkeypatch):
    """The format that auto chooses may need a file that is missing."""
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(ConfigError, match="gpt-oss.*cannot be built"):
        check(changed(), byte_tokenizer(tmp_path, [], "<|channel|> <|call|>"))


@pytest.mark.parametrize(
    ("settings", "template", "grammars"),
    [
        ((), "", True),
        (("generation.backend=embedded",), "", False),
        (("generation.sglang.args={}",), "", False),
        (("generation.sglang.args={skip_tokenizer_init: false, grammar-backend: outlines}",), "", False),
        (("asynchronous.kv_on_update=keep",), "", False),
        (("rollout.gateway.tool_format=gpt-oss",), "", False),
        ((), "<|channel|> <|call|>", False),
        (("rollout.gateway.tool_format=qwen3",), "<|channel|> <|call|>", True),
    ],
)
def test_grammars_need_an_engine_and_a_format_for_them(tmp_path, settings, template, grammars):
    tokenizer = byte_tokenizer(tmp_path, [], template)
    sglang = ("generation.backend=sglang", "generation.sglang.args={skip-tokenizer-init: false}")

    async def body():
        return gateway_of(changed(*sglang, *settings), tokenizer)._shared.grammars

    assert asyncio.run(body()) == grammars
