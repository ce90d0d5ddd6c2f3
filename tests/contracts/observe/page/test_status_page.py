"""The status page in a real browser."""

import pytest

from tests.support.needs import need_program
from tests.support.view.chromium import browser
from tests.support.view.shown_trial import HOSTILE


@pytest.fixture(scope="module")
def shared():
    need_program("chromium")
    with browser() as made:
        yield made


@pytest.fixture
def page(shared):
    shared.servers, shared.bad = None, 0
    return shared


def test_page_says_which_run_it_is(page):
    page.open(page.status_page)
    assert page.text("h1") == "demo/shown" and page.text("#state") == "done"
    assert "step 40 of 40, 1 restart" in page.text("#phase")
    assert page.js("document.title").startswith("demo/shown · step 40")
    assert "serve.d1p1m1+d2p1m1" in page.text("#about") and str(page.paths.root) in page.text("#identity")


def test_bottleneck_is_one_sentence_with_parts(page):
    page.open(page.status_page)
    assert page.text("#bottleneck").startswith("Generation-bound: the trainer waits 45 %")
    shares = [int(text.split()[-2]) for text in page.texts("#splitLegend span")]
    assert sum(shares) == 100 and page.texts("#splitLegend span")[0] == "waits for batches 45 %"


def test_incomplete_evaluation_shows_no_accuracy(page):
    page.open(page.status_page)
    rows = page.texts("#evaluations tr")
    assert rows[1].split("\t") == ["after", "sums", "40", "incomplete: 3 of 96 failed"]
    assert page.texts(".tile")[0].split("\n")[1:] == ["74.0 %", "+33.0 points since step 0"]


def test_failed_request_names_its_status(page):
    page.open(page.status_page)
    answer = "new Response('Internal Server Error', {status: 500})"
    assert page.js(f"window.fetch = async () => {answer}; load('run').catch(error => error.message)") == "status 500"


def test_run_is_as_new_as_its_curves(page):
    """Else an evaluation that ends between the two requests would be missing on the curves."""
    page.open(page.status_page)
    asked = [url.partition("/view/")[2].partition("?")[0] for url in page.page.requests if "/view/" in url]
    assert asked.index("curves") < asked.index("run")


def test_running_evaluation_shows_no_accuracy(page):
    page.servers = 1
    page.open(page.status_page)
    assert page.texts("#evaluations tr")[1].split("\t") == ["step-40", "", "", "21 of 32 done"]


def test_troubled_servers_come_first(page):
    page.servers, page.bad = 64, 2
    page.open(page.status_page)
    rows = page.texts("#servers tr")
    assert "generation_server/62" in rows[1] and "generation_server/63" in rows[2] and "updating to 40" in rows[3]
    assert "62 of 64 usable, 2 in trouble" in page.text("#serversOf") and len(rows) == 10
    assert page.text("#trouble") == "2 of 64 servers in trouble"
    page.js("document.querySelector('#servers button').click()")
    assert len(page.texts("#servers tr")) == 66


def test_ended_run_hides_live_parts(page):
    page.open(page.status_page)
    assert page.js("[...document.querySelectorAll('.live')].every(part => part.hidden)")


@pytest.mark.parametrize("name", ["status", "samples"])
def test_untrusted_text_never_becomes_markup(page, name):
    page.servers, page.bad = 2, 1
    page.open(page.status_page if name == "status" else page.samples_page("&id=0000000000.0/1.0"))
    assert HOSTILE in page.js("document.body.textContent")
    assert page.js("document.title") != "owned" and page.js("document.querySelectorAll('img, body script').length") == 0
    assert page.page.problems == []


@pytest.mark.parametrize("name", ["status", "samples"])
def test_nothing_comes_from_elsewhere(page, name):
    page.open(page.status_page if name == "status" else page.samples_page())
    host = page.status_page.partition("/#")[0]
    assert page.page.problems == []
    assert {url for url in page.page.requests if not url.startswith((host, "data:", "about:"))} == set()


@pytest.mark.parametrize("name", ["status", "samples"])
def test_wrong_key_is_asked_for(page, name):
    url = page.status_page if name == "status" else page.samples_page()
    page.open(url.replace(page.server.key, "wrong"))
    shown = "[...document.querySelectorAll('main > *')].filter(node => node.offsetParent).map(node => node.id)"
    assert page.js(shown) == ["", "keyForm"]  # no empty filters beside the header and the form
    script = "document.getElementById('key').value = {!r}; document.querySelector('#keyForm button').click()"
    page.js(script.format(page.server.key))
    page.until("document.body.dataset.ready")
    assert page.text("h1") in ("demo/shown", "Samples") and len(page.js(shown)) > 2
