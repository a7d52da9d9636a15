"""Shows how to repeat a failed crash test."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.crash.seed import TIMEOUT, replay


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/crash" in item.path.as_posix():
            item.add_marker(pytest.mark.crash)
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        name = getattr(item, "originalname", item.name)
        report.sections.append(("seed", f"Repeat with: {replay(name)}"))
    return report
