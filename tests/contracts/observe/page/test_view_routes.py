"""The HTTP surface of `realsys view`: who may read what, and that reading never blocks the event loop."""

import asyncio
import json
import threading
import urllib.error
import urllib.request

import pytest

from realsys.config.paths import TrialPaths, read_config, write_config
from realsys.observe.page.app import OPEN, SECRET, Desk, ViewServer
from tests.support.view.shown_trial import sample_trial


@pytest.fixture
def server(tmp_path):
    async def live():
        return None

    made = ViewServer(sample_trial(tmp_path), live, lambda: False)
    made.start()
    yield made
    made.close()


def ask(server, path, key="", method="GET"):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(server.address.partition("/#")[0] + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), dict(error.headers)


@pytest.mark.parametrize("path", [*OPEN, *SECRET])
def test_data_needs_the_key(server, path):
    assert ask(server, path)[0] == 401 and ask(server, path, "wrong")[0] == 401
    assert ask(server, f"{path}?source=dropped", server.key)[0] in (200, 400)


@pytest.mark.parametrize("path", ["/", "/view/samples", "/view/static/base.css", "/view/static/samples.js"])
def test_pages_have_no_data_and_need_no_key(server, path):
    status, body, headers = ask(server, path)
    assert status == 200 and b"demo" not in body and "default-src 'none'" in headers["content-security-policy"]
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body


@pytest.mark.parametrize("name", ["../app.py", "%2e%2e%2fapp.py", "x.js", "status.html"])
def test_no_other_file_is_served(server, name):
    assert ask(server, f"/view/static/{name}", server.key)[0] == 404


def test_nothing_can_be_changed(server):
    assert ask(server, "/view/run", server.key, "POST")[0] == 405


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/view/api/list?source=step:7", "step 7 is not recorded"),
        ("/view/api/list?source=dropped&order=best", "use one of source, longest"),
        ("/view/api/sample?source=dropped&id=x", "no dropped or failed group has sample 'x'"),
    ],
)
def test_bad_request_is_one_line(server, path, problem):
    status, body, _ = ask(server, path, server.key)
    assert status == 400 and problem in json.loads(body)["error"]


def test_files_are_read_outside_the_loop(tmp_path):
    desk = Desk(sample_trial(tmp_path), lambda: False)
    assert asyncio.run(desk.read(threading.current_thread)) is not threading.main_thread()


def test_readers_take_turns(tmp_path):
    """The second reader begins when the first has ended, also if its caller has gone."""
    desk = Desk(sample_trial(tmp_path), lambda: False)
    order: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow():
        order.append("first begins")
        begun.set()
        assert may_end.wait(30)
        order.append("first ends")

    async def body():
        first = asyncio.create_task(desk.read(slow))
        await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(desk.read(lambda: order.append("second")))
        first.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await second

    asyncio.run(body())
    assert order == ["first begins", "first ends", "second"]


def test_resumed_trial_shows_its_new_configuration(server, tmp_path):
    def identity():
        return dict(json.loads(ask(server, "/view/run", server.key)[1])["identity"])

    assert not identity()["batch"].startswith("77 prompts")
    paths = TrialPaths(tmp_path / "demo" / "shown")
    config = read_config(paths.config)
    train = config.train.model_copy(update={"batch_groups": 77})
    write_config(config.model_copy(update={"train": train}), paths.config)
    assert identity()["batch"].startswith("77 prompts")
