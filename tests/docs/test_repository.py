"""Checks for texts that must not occur in the repository."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.support.documentation import ROOT

_REGISTRIES = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("anaconda", "org"),
    ("npmjs", "com"),
    ("docker", "io"),
    ("ghcr", "io"),
    ("quay", "io"),
]
"""Split, so that this file does not contain them."""

_NOT_OURS = {"__pycache__", "dist", "results", "node_modules"}
_OURS_THOUGH_HIDDEN = {".ci", ".gitignore"}


@functools.cache
def _texts() -> dict[str, str]:
    """Returns every file of the repository, by path."""
    texts: dict[str, str] = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if _is_ours(name)]
        for file in filter(_is_ours, files):
            path = Path(folder) / file
            texts[str(path.relative_to(ROOT))] = path.read_bytes().decode(errors="replace")
    return texts


def _is_ours(name: str) -> bool:
    return name not in _NOT_OURS and (not name.startswith(".") or name in _OURS_THOUGH_HIDDEN)


@pytest.mark.parametrize("host", [".".join(host) for host in _REGISTRIES])
def test_no_file_contains_the_host_of_a_package_registry(host: str) -> None:
    assert len(_texts()) > 50
    assert [path for path, text in _texts().items() if host in text] == []
