"""The pages of a trial that has trained nothing yet, in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.support.needs import need_program
from tests.support.view.browser import Browser, browser


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    need_program("chromium")
    with browser() as made:
        made.paths.steps.write_text("")
        for path in (made.paths.events, made.paths.summary):
            path.unlink()
        for folder in (made.paths.records, made.paths.evaluations, made.paths.dropped):
            shutil.rmtree(folder)
        yield made


def test_status_page_without_steps_is_whole(page: Browser) -> None:
    page.open(page.status_page)
    assert page.text("#bottleneck") == "No train step yet." and page.text("#state") == "killed"
    assert len(page.js("[...document.querySelectorAll('.chart text.none')].map(text => text.textContent)")) == 12
    assert page.page.problems == []


def test_viewer_without_samples_says_so(page: Browser) -> None:
    page.open(page.samples_page())
    assert page.text("#count").startswith("This trial has no samples") and page.page.problems == []
