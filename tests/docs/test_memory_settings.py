"""The settings in docs/allocation.md are those of the predictor."""

from __future__ import annotations

from tests.support.docs.memory_settings import PAGE, rewrite


def test_page_has_the_settings_of_the_predictor() -> None:
    page = PAGE.read_text("utf-8")
    assert page == rewrite(page), "run `make docs`"
