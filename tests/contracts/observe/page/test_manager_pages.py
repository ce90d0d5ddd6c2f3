"""The pages as a manager serves them: everybody sees the status, the samples need the trial's token."""

import json
import urllib.error
import urllib.request
from typing import Any, cast

import pytest

from realsys.cluster.http_server import HttpServer
from realsys.manager.routes import ManagerApp, Pages
from realsys.observe.page.app import SECRET, routes
from tests.support.view.shown_trial import live_status, sample_trial

TOKEN = "the-token-of-the-trial"


@pytest.fixture
def manager(tmp_path):
    async def live():
        return live_status(2)

    nothing = cast(Any, None)
    pages = Pages(routes(sample_trial(tmp_path), live), SECRET)
    server = HttpServer(ManagerApp(nothing, TOKEN, nothing, pages=pages).build())
    server.start()
    yield server.url
    server.close()


def status_of(url, token=""):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("path", ["/", "/view/samples", "/view/run", "/view/curves", "/view/live"])
def test_status_needs_no_token(manager, path):
    assert status_of(manager + path) == 200


@pytest.mark.parametrize("path", SECRET)
def test_samples_need_the_token(manager, path):
    assert status_of(manager + path) == status_of(manager + path, "wrong") == 401
    assert status_of(f"{manager}{path}?source=dropped&id=0000000080.0/0", TOKEN) == 200


def test_run_that_lives_is_running(manager):
    with urllib.request.urlopen(f"{manager}/view/run", timeout=30) as answer:
        run = json.load(answer)
    assert run["state"] == "running" and run["ledger"] is None
    with urllib.request.urlopen(f"{manager}/view/live", timeout=30) as answer:
        assert len(json.load(answer)["servers"]) == 2
