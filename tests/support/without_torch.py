"""Checks on an interpreter without torch (``make python-test``): what needs torch is skipped by name.

    python3.12 -m tests.support.without_torch                                   import every module
    python3.12 -m pytest -p tests.support.without_torch tests/unit              pytest plugin

Any other failure stays a failure.
"""

import importlib
import pkgutil
import platform
import sys
from collections.abc import Generator

import pytest

import realsys

_PACKAGES = ("torch", "megatron")
_MESSAGES = tuple(f"No module named '{package}" for package in _PACKAGES)
_REASON = "needs torch, which this Python does not have"


def is_about_torch(error: BaseException | None) -> bool:
    """Return True if an import of torch is the cause of ``error``, also in a process that the test has started."""
    while error is not None:
        if any(message in str(error) for message in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.failed and any(message in report.longreprtext for message in _MESSAGES):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, _REASON)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and is_about_torch(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, _REASON)
    return report


def main() -> int:
    """Import every module of realsys. Returns 1 if one fails for another reason than torch."""
    imported, waiting, failed = 0, 0, 0
    for module in pkgutil.walk_packages(realsys.__path__, "realsys.", onerror=lambda name: None):
        if "cpu_support" in module.name or module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
            imported += 1
        except ImportError as error:
            if is_about_torch(error):
                waiting += 1
                continue
            print(f"{module.name}: {error}")
            failed += 1
    print(f"Python {platform.python_version()}: {imported} modules imported, {waiting} need torch, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
