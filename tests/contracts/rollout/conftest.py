"""The chat form of the tiny model behind a real engine, shared by the tests of the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from realsys.data.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.serving.gateways import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("chat_model"))


@pytest.fixture(scope="session")
def tokenizer(chat_model: Path) -> TextTokenizer:
    from realsys.data.tokenizer import TextTokenizer

    return TextTokenizer(chat_model)


@pytest.fixture(scope="module")
def server(chat_model: Path) -> Iterator[str]:
    from tests.support.serving.gateways import chat_server

    with chat_server(chat_model) as url:
        yield url
