"""The layout of the source tree is what docs/architecture.md draws."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.docs.generate import architecture
from tests.docs.package_graph import CAPABILITIES, imports, package
from tests.support.documentation import ROOT

_BELOW = {"tasks", "access"}
"""Every capability may import these; they are listed as well."""


def test_drawing_of_the_packages_is_up_to_date() -> None:
    assert (ROOT / "docs" / "architecture.md").read_text() == architecture(), (
        "run .venv/bin/python -m tests.docs.generate"
    )


@pytest.mark.parametrize("capability", [each for each in CAPABILITIES if each not in ("spark", "workers")])
def test_capability_is_reached_through_its_public_modules(capability: str) -> None:
    public = set(import_module(f"interlock.{capability}").PUBLIC)
    used = {
        other.removeprefix(f"{capability}.")
        for one, other in imports()
        if package(other) == capability and package(one) in CAPABILITIES and package(one) != capability
    }
    assert used - public == set(), "use a public module, or add it to PUBLIC"
    assert public - used == set(), "nobody imports these; take them out of PUBLIC"
