"""The packages of the source tree: which imports which, drawn for docs/architecture.md."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Container
from pathlib import Path
from typing import Final

import interlock

ROOT: Final = Path(interlock.__file__).parent
CAPABILITIES: Final = (
    "spark",
    "workers",
    "bus",
    "dags",
    "query",
    "datasets",
    "webhooks",
    "jobs",
    "untrusted",
    "tasks",
    "access",
    "dev",
)
DRAWN: Final = ("cli", "client", "apps", *CAPABILITIES)


def modules() -> dict[str, Path]:
    """Modules by their dotted name below `interlock`."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path for path in paths}


def imports() -> set[tuple[str, str]]:
    """Pairs of modules, the importing one first."""
    known = modules()
    found = set()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {(name, other) for other in _imported(node, known)}
    return found


def imports_at_start() -> set[tuple[str, str]]:
    """Pairs of modules as `imports`, without imports inside functions and for type checkers only."""
    known = modules()
    return {
        (name, other)
        for name, path in known.items()
        for node in ast.parse(path.read_text()).body
        for other in _imported(node, known)
        if other != name
    }


def _imported(node: ast.AST, known: Container[str]) -> set[str]:
    if isinstance(node, ast.Import):
        named = {each.name for each in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
        named = {f"{node.module}.{each.name}" for each in node.names}
    else:
        return set()
    inside = {name.removeprefix("interlock.") for name in named if name.startswith("interlock.")}
    return {name if name in known else name.rpartition(".")[0] for name in inside} - {""}


def package(module: str) -> str:
    return module.partition(".")[0]


def drawing() -> str:
    """Returns a Mermaid graph of the packages, without edges that follow from others."""
    edges: defaultdict[str, set[str]] = defaultdict(set)
    for one, other in imports():
        if package(one) != package(other) and {package(one), package(other)} <= set(DRAWN):
            edges[package(one)].add(package(other))
    lines = [
        f"  {one} --> {other}"
        for one in DRAWN
        for other in DRAWN
        if other in edges[one] and not _implied(edges, one, other)
    ]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def _implied(edges: dict[str, set[str]], one: str, other: str) -> bool:
    return any(other in _reached(edges, via) for via in edges[one] if via != other)


def _reached(edges: dict[str, set[str]], start: str) -> set[str]:
    found, ahead = set[str](), [start]
    while ahead:
        for each in edges[ahead.pop()] - found:
            found.add(each)
            ahead.append(each)
    return found
