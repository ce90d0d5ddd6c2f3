"""The sample viewer in a real browser."""

import pytest

from tests.support.needs import need_program
from tests.support.view.chromium import browser
from tests.support.view.shown_trial import HOSTILE

FIRST, CUT, TURNS = "0000000000.0/0.0", "0000000000.0/1.0", "0000000001.0/1.0"


@pytest.fixture(scope="module")
def page():
    need_program("chromium")
    with browser() as made:
        yield made


def choose(page, name, value):
    """Set a filter as a user does, and wait for the list."""
    page.js("document.body.dataset.ready = ''")
    field = f"document.getElementById({name!r})"
    page.js(f"{field}.checked = true" if name == "truncated" else f"{field}.value = {value!r}")
    page.js(f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    page.until("document.body.dataset.ready === '1'")


def shown_ids(page):
    return list(page.js("[...document.querySelectorAll('#list button')].map(button => button.dataset.id)"))


def test_sample_shows_turns_reference_and_verdict(page):
    page.open(page.samples_page(f"&id={TURNS}"))
    assert page.texts("#turns pre") == ["what is 3+4 ?", "#6", "wrong, try again", "#7"]
    assert [text.partition(" ·")[0] for text in page.texts("#turns h2")] == [
        "prompt", "completion", "given, not trained", "completion",
    ]  # fmt: skip
    assert page.text("#reference") == "7" and page.text("#verdictLine").startswith("correct")
    assert "ticket" in page.text("#facts") and "generation_server/0 (4)" in page.text("#facts")


@pytest.mark.parametrize(
    ("name", "value", "ids"),
    [
        ("verdict", "wrong", [CUT, "0000000001.0/0.0"]),
        ("order", "longest", [CUT, TURNS, FIRST, "0000000001.0/0.0"]),
        ("truncated", "1", [CUT]),
        ("reward_min", "0.5", [FIRST, TURNS]),
        ("text", "TRY AGAIN", [TURNS]),
        ("stale_min", "3", []),
        ("tokens_min", "5", [CUT]),
        ("group", "0000000001", ["0000000001.0/0.0", TURNS]),
    ],
)
def test_filter_chooses_samples(page, name, value, ids):
    page.open(page.samples_page())
    assert len(shown_ids(page)) == 4
    choose(page, name, value)
    assert shown_ids(page) == ids and page.text("#count").startswith(f"{len(ids)} of 4 samples")
    assert f"{name}=" in page.js("location.hash")


def test_searched_text_is_marked(page):
    page.open(page.samples_page())
    choose(page, "text", "TRY AGAIN")
    assert (
        "".join(page.js("[...document.querySelectorAll('#turns .hit')].map(token => token.textContent)")) == "try again"
    )
    choose(page, "text", "")
    assert page.texts("#turns .hit") == []


@pytest.mark.parametrize(
    ("source", "prompts"),
    [
        ("step:40", ["1+2=", "what is 3+4 ?"]),
        ("eval:after-40", ["5+0=", "5+1=", "5+2="]),
        ("dropped", ["1+2=", "1+2=", ""]),  # the trainer does not know the text of its prompts
    ],
)
def test_head_of_a_group_has_its_prompt(page, source, prompts):
    page.open(page.samples_page(f"&source={source}"))
    assert page.texts("#list .prompt")[: len(prompts)] == prompts


def test_filters_stand_on_one_line(page):
    page.open(page.samples_page())
    tops = page.js("[...document.querySelectorAll('#filters > label')].map(label => label.getBoundingClientRect().top)")
    assert len(tops) == 4 and len(set(tops)) == 1


def test_address_brings_the_same_view_back(page):
    page.open(page.samples_page(f"&verdict=wrong&order=longest&colour=logprob&id={CUT}"))
    assert shown_ids(page) == [CUT, "0000000001.0/0.0"] and page.text("#sampleId") == CUT
    assert page.js("document.querySelector('[name=colour]:checked').value") == "logprob"


def test_token_tells_version_and_probability(page):
    page.open(page.samples_page(f"&id={TURNS}"))
    page.js("document.querySelector('#turns .sampled span').click()")
    tip = page.text("#tip")
    assert '"#"' in tip and "v37" in tip and "log-prob -0.0100 (p 99.0 %)" in tip and "advantage -1.000" in tip


def test_evaluation_and_dropped_groups_are_shown(page):
    page.open(page.samples_page())
    labels = page.js("[...document.querySelectorAll('#source optgroup')].map(group => group.label)")
    assert labels == ["train steps", "evaluations", "not trained"]
    choose(page, "source", "eval:after-40")
    assert shown_ids(page) == ["0/0", "1/0", "2/0"] and page.text("#reference") == "5"
    choose(page, "source", "dropped")
    assert len(shown_ids(page)) == 3 and "equal_rewards" in page.text("#list")
    assert "too old (masked)" in page.text("#list")
    assert page.text("#facts").startswith("error") and HOSTILE in page.text("#facts")


def test_damaged_record_is_said(page):
    page.open(page.samples_page("&source=step:40"))
    assert page.js("load('api/list?source=step:9').catch(error => error.message)").endswith(
        "step 9 is not recorded; there is 40"
    )


def test_sample_that_arrives_late_is_not_shown(page):
    """The answer about the first sample comes after the one about the second, which the reader chose later."""
    page.open(page.samples_page(f"&id={TURNS}"))
    page.js(
        "globalThis.release = []; const real = load; load = async (...args) => { const found = await real(...args);"
        " if (args[0].includes('%2F0.0')) await new Promise(go => release.push(go)); return found; }; 0"
    )
    page.js(
        f"document.body.dataset.late = ''; show({FIRST!r}, false).then(() => {{ document.body.dataset.late = '1' }}); 0"
    )
    page.until("release.length === 1")
    page.js(f"show({CUT!r}, false)")
    page.until(f"document.body.dataset.sample === {CUT!r}")
    page.js("release[0]()")
    page.until("document.body.dataset.late === '1'")
    assert page.text("#sampleId") == CUT
