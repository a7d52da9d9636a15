"""The layout of the source tree is what docs/architecture.md draws."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from importlib import import_module

import pytest

from tests.docs.generate import architecture
from tests.docs.package_graph import CAPABILITIES, imports, imports_at_start, modules, package
from tests.support.documentation import ROOT


def test_drawing_of_the_packages_is_up_to_date() -> None:
    assert (ROOT / "docs" / "architecture.md").read_text() == architecture(), (
        "run .venv/bin/python -m tests.docs.generate"
    )


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_capability_is_reached_through_its_public_modules(capability: str) -> None:
    public = set(import_module(f"interlock.{capability}").PUBLIC)
    used = {
        other.removeprefix(f"{capability}.")
        for one, other in imports()
        if package(other) == capability and package(one) in CAPABILITIES and package(one) != capability
    }
    assert used - public == set(), "use a public module, or add it to PUBLIC"
    assert public - used == set(), "nobody imports these; take them out of PUBLIC"


def test_modules_import_each_other_in_no_cycle() -> None:
    assert _cycle(imports_at_start()) == []


def test_packages_import_each_other_in_no_cycle() -> None:
    edges = {(package(one), package(other)) for one, other in imports()}
    assert _cycle({(one, other) for one, other in edges if one != other}) == []


def _cycle(edges: set[tuple[str, str]]) -> list[str]:
    graph = TopologicalSorter[str]()
    for one, other in edges:
        graph.add(one, other)
    try:
        graph.prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_module_loads_only_statements_of_its_own_capability() -> None:
    calls = [
        (name, ast.unparse(node.args[0]))
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "queries"
    ]
    assert calls
    assert [call for call in calls if call[1] != "__name__"] == []


def test_no_capability_has_more_than_twelve_collaborators() -> None:
    large = {
        f"{name}.{node.name}": len(fields)
        for name, path in modules().items()
        if name.rpartition(".")[2] == "build" or name == "apps.app"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and len(fields := [line for line in node.body if isinstance(line, ast.AnnAssign)]) > 12
    }
    assert large == {}, "split the object, or give a collaborator its own settings"


def test_handlers_use_their_own_capability() -> None:
    """`tasks` and `access` are the two capabilities that every other one may use."""
    foreign = {
        (one, other)
        for one, other in imports()
        if one.endswith("routes")
        and other.endswith(".build")
        and package(other) not in {package(one), "tasks", "access"}
    }
    assert foreign == set(), "handlers receive their own capability; pass the collaborator to its build function"


def test_capability_is_read_from_the_application_only_by_its_own_modules() -> None:
    """The state of a listener has every capability. The build module of each has the one function that reads it."""
    foreign = {
        (name, node.attr)
        for name, path in modules().items()
        if package(name) in CAPABILITIES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).endswith(".app.state")
        and (name, node.attr) not in {(f"{node.attr}.build", node.attr), ("query.routes", "queries")}
    }
    assert foreign == set(), "receive the collaborator from build.py"
