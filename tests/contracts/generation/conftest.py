"""Generation servers, shared because SGLang and vLLM take long to start. Each fixture imports its modules itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.serving.generation_servers import Running, ServerUnderTest, Versions


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    from tests.support.serving.generation_servers import make_versions

    return make_versions(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def sglang(versions: Versions) -> Iterator[Running]:
    from tests.support.serving.generation_servers import child_server
    from tests.support.serving.sglang_server import needs_sglang

    needs_sglang()
    with child_server("sglang", versions) as running:
        yield running


@pytest.fixture(scope="session")
def vllm(versions: Versions) -> Iterator[Running]:
    from tests.support.serving.generation_servers import child_server
    from tests.support.serving.sglang_server import needs_vllm

    needs_vllm()
    with child_server("vllm", versions) as running:
        yield running


@pytest.fixture(scope="module", params=["embedded", "sglang", "sglang-derived", "vllm", "example"])
def backend(request: pytest.FixtureRequest) -> Iterator[Running | str]:
    """A name: an engine for each test. sglang-derived: SGLang taken for one that tells no version per token."""
    from tests.support.serving.generation_servers import reporting

    if request.param in ("embedded", "example"):
        yield request.param
        return
    running = request.getfixturevalue(request.param.removesuffix("-derived"))
    with reporting(running, request.param == "sglang"):
        yield running


@pytest.fixture
def server(backend: Running | str, versions: Versions) -> Iterator[ServerUnderTest]:
    from tests.support.serving.generation_servers import embedded_server, example_server, fresh

    if not isinstance(backend, str):
        yield fresh(backend, versions)
        return
    with (embedded_server if backend == "embedded" else example_server)(versions) as made:
        yield made
