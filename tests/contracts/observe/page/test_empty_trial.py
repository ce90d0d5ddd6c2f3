"""The pages of a trial that has trained nothing yet, in a real browser."""

import shutil

import pytest

from tests.support.needs import need_program
from tests.support.view.chromium import browser


@pytest.fixture(scope="module")
def page():
    need_program("chromium")
    with browser() as made:
        made.paths.steps.write_text("")
        for path in (made.paths.events, made.paths.summary):
            path.unlink()
        for folder in (made.paths.records, made.paths.evaluations, made.paths.dropped):
            shutil.rmtree(folder)
        yield made


def test_status_page_without_steps_is_whole(page):
    page.open(page.status_page)
    assert page.text("#bottleneck") == "No train step yet." and page.text("#state") == "killed"
    assert len(page.js("[...document.querySelectorAll('.chart text.none')].map(text => text.textContent)")) == 12
    assert page.page.problems == []


def test_viewer_without_samples_says_so(page):
    page.open(page.samples_page())
    assert page.text("#count").startswith("This trial has no samples") and page.page.problems == []
