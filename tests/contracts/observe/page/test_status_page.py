"""The status page in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.needs import need_program
from tests.support.view.browser import Browser, browser
from tests.support.view.shown_trial import HOSTILE

PHONE = 390


@pytest.fixture(scope="module")
def shared() -> Iterator[Browser]:
    need_program("chromium")
    with browser() as made:
        yield made


@pytest.fixture
def page(shared: Browser) -> Browser:
    shared.servers, shared.bad = None, 0
    return shared


def test_page_says_which_run_it_is(page: Browser) -> None:
    page.open(page.status_page)
    assert page.text("h1") == "demo/shown" and page.text("#state") == "done"
    assert "step 40 of 40, 1 restart" in page.text("#phase")
    assert page.js("document.title").startswith("demo/shown · step 40")
    assert "serve.d1p1m1+d2p1m1" in page.text("#about") and str(page.paths.root) in page.text("#identity")


def test_bottleneck_is_one_sentence_with_parts(page: Browser) -> None:
    page.open(page.status_page)
    assert page.text("#bottleneck").startswith("Generation-bound: the trainer waits 45 %")
    shares = [int(text.split()[-2]) for text in page.texts("#splitLegend span")]
    assert sum(shares) == 100 and page.texts("#splitLegend span")[0] == "waits for batches 45 %"


def test_legend_has_the_percentages_of_the_server(page: Browser) -> None:
    """The sentence has them, too. A part of 0 % is named without a number."""
    page.open(page.status_page)
    page.js("run.split.parts = {wait: [0.6, 0], train: [97.4, 98], other: [2, 2]}; showSplit()")
    assert page.texts("#splitLegend span") == ["training 98 %", "plans, transfers 2 %", "under 1 %: waits for batches"]


def test_curves_of_training_are_drawn(page: Browser) -> None:
    page.open(page.status_page)
    titles = page.js("[...document.querySelectorAll('.chart')].map(chart => chart.dataset.chart)")
    for title in ("Accuracy", "Reward", "Completion length", "KL divergence", "Entropy", "Tokens per second"):
        assert title in titles
        assert page.js(f"document.querySelector('[data-chart=\"{title}\"] path.line').getAttribute('d').length") > 100
    assert page.text("[data-chart='Accuracy'] .legend").startswith("held-out 74.0 %")


def test_restart_is_marked_on_every_curve(page: Browser) -> None:
    page.open(page.status_page)
    marks = page.js("[...document.querySelectorAll('.chart')].map(chart => chart.querySelectorAll('.mark').length)")
    assert marks and set(marks) == {1}
    assert "went back to step 20" in page.js("document.querySelector('.flag title').textContent")


def test_pointer_shows_one_step_on_all_curves(page: Browser) -> None:
    page.open(page.status_page)
    page.js(
        "const svg = document.querySelector('.chart svg'), box = svg.getBoundingClientRect(); svg.dispatchEvent("
        "new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 50}))"
    )
    assert [text.split()[:2] for text in page.texts(".chart .legend")] == [["step", "18"]] * 12


def test_incomplete_evaluation_shows_no_accuracy(page: Browser) -> None:
    page.open(page.status_page)
    rows = page.texts("#evaluations tr")
    assert rows[1].split("\t") == ["after", "sums", "40", "incomplete: 3 of 96 failed"]
    assert page.texts(".tile")[0].split("\n")[1:] == ["74.0 %", "+33.0 points since step 0"]


def test_held_out_accuracy_is_of_one_set(page: Browser) -> None:
    """The newest evaluation is of another set: its accuracy and the gain must not be mixed with the held-out ones."""
    page.open(page.status_page)
    page.js("run.evaluations.unshift({set: 'sums', accuracy: 0.1, step: 40, held_out: false}); showTiles(null)")
    assert page.texts(".tile")[0].split("\n")[1:] == ["74.0 %", "+33.0 points since step 0"]


def test_tiles_leave_out_biased_batches(page: Browser) -> None:
    """The last batch of a run is biased: the tile shows the mean of the nine before it."""
    page.open(page.status_page)
    shown = page.js("brief(mean(drawn.columns.reward.slice(-10, -1)))")
    assert page.js("drawn.columns.biased.at(-1)") == 1 and shown != page.js("brief(lastOf('reward', 10))")
    assert page.texts(".tile")[1].split("\n")[1] == shown


def test_biased_batches_are_joined_and_lone_steps_are_dots(page: Browser) -> None:
    """Steps 1, 2 and 40 are biased; here 4 and 5, too: step 3 has no neighbours on the line."""
    page.open(page.status_page)
    page.js("drawn.columns.biased[3] = drawn.columns.biased[4] = 1; charts.draw(drawn)")
    reward = "document.querySelector('[data-chart=\"Reward\"]')"
    assert page.js(f"{reward}.querySelectorAll('circle.hollow').length") == 5
    assert page.js(f"{reward}.querySelectorAll('circle:not(.hollow)').length") == 1
    assert page.js(f"{reward}.querySelector('path.joined').getAttribute('d').match(/[ML]/g).join('')") == "MLLLLLML"


def test_bound_on_staleness_is_on_its_chart(page: Browser) -> None:
    page.open(page.status_page)
    lines = "[...document.querySelectorAll('.chart')].filter(chart => chart.querySelector('line.bound'))"
    assert page.js(f"{lines}.map(chart => chart.dataset.chart)") == ["Staleness"]
    assert f"bound at the start {page.js('run.max_staleness')}" in page.text("[data-chart='Staleness'] .legend")


def test_failed_request_names_its_status(page: Browser) -> None:
    page.open(page.status_page)
    answer = "new Response('Internal Server Error', {status: 500})"
    assert page.js(f"window.fetch = async () => {answer}; load('run').catch(error => error.message)") == "status 500"


def test_run_is_as_new_as_its_curves(page: Browser) -> None:
    """Else an evaluation that ends between the two requests would be missing on the curves."""
    page.open(page.status_page)
    asked = [url.partition("/view/")[2].partition("?")[0] for url in page.page.requests if "/view/" in url]
    assert asked.index("curves") < asked.index("run")


def test_running_evaluation_shows_no_accuracy(page: Browser) -> None:
    page.servers = 1
    page.open(page.status_page)
    assert page.texts("#evaluations tr")[1].split("\t") == ["step-40", "", "", "21 of 32 done"]


def test_troubled_servers_come_first(page: Browser) -> None:
    page.servers, page.bad = 64, 2
    page.open(page.status_page)
    rows = page.texts("#servers tr")
    assert "generation_server/62" in rows[1] and "generation_server/63" in rows[2] and "updating to 40" in rows[3]
    assert "62 of 64 usable, 2 in trouble" in page.text("#serversOf") and len(rows) == 10
    assert page.text("#trouble") == "2 of 64 servers in trouble"
    page.js("document.querySelector('#servers button').click()")
    assert len(page.texts("#servers tr")) == 66


def test_ended_run_hides_live_parts(page: Browser) -> None:
    page.open(page.status_page)
    assert page.js("[...document.querySelectorAll('.live')].every(part => part.hidden)")


def test_gauge_and_legend_agree(page: Browser) -> None:
    """A group counts once: the width is what is open and what may start."""
    page.servers = 2
    page.open(page.status_page)
    widths = page.js("[...document.querySelectorAll('#gauge i')].map(bar => parseFloat(bar.style.width))")
    assert widths == pytest.approx([100 * 110 / 316, 100 * 90 / 316], abs=0.01)
    assert page.texts("#gaugeLegend span") == ["110 finished, not trained", "90 running", "116 may start"]


@pytest.mark.parametrize("name", ["status", "samples"])
def test_untrusted_text_never_becomes_markup(page: Browser, name: str) -> None:
    page.servers, page.bad = 2, 1
    page.open(page.status_page if name == "status" else page.samples_page("&id=0000000000.0/1.0"))
    assert HOSTILE in page.js("document.body.textContent")
    assert page.js("document.title") != "owned" and page.js("document.querySelectorAll('img, body script').length") == 0
    assert page.page.problems == []


@pytest.mark.parametrize("name", ["status", "samples"])
def test_nothing_comes_from_elsewhere(page: Browser, name: str) -> None:
    page.open(page.status_page if name == "status" else page.samples_page())
    host = page.status_page.partition("/#")[0]
    assert page.page.problems == []
    assert {url for url in page.page.requests if not url.startswith((host, "data:", "about:"))} == set()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["status", "samples"])
def test_page_fits_a_phone(page: Browser, name: str, dark: bool) -> None:
    page.servers, page.bad = 64, 2
    page.open(page.status_page if name == "status" else page.samples_page("&id=0000000000.0/1.0"), PHONE, dark=dark)
    assert page.js("document.scrollingElement.scrollWidth") == PHONE
    colours = page.js("[document.body, document.documentElement].map(node => getComputedStyle(node).backgroundColor)")
    assert colours[0] == ("rgb(14, 17, 21)" if dark else "rgb(245, 246, 248)")


@pytest.mark.parametrize("name", ["status", "samples"])
def test_wrong_key_is_asked_for(page: Browser, name: str) -> None:
    url = page.status_page if name == "status" else page.samples_page()
    page.open(url.replace(page.server.key, "wrong"))
    shown = "[...document.querySelectorAll('main > *')].filter(node => node.offsetParent).map(node => node.id)"
    assert page.js(shown) == ["", "keyForm"]  # no empty filters beside the header and the form
    script = "document.getElementById('key').value = {!r}; document.querySelector('#keyForm button').click()"
    page.js(script.format(page.server.key))
    page.until("document.body.dataset.ready")
    assert page.text("h1") in ("demo/shown", "Samples") and len(page.js(shown)) > 2
