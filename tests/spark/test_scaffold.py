"""`interlock operator`: the code that it generates and the documented examples run."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from interlock.cli.app import execute
from interlock.spark import TaskFailed
from interlock.spark.operators import BUILT_IN
from interlock.workers import failures
from interlock.workers.operators import PLATFORM

EXAMPLES = Path(__file__).parents[2] / "examples" / "operators"


def checks_in(module: ModuleType) -> list[Callable[[], None]]:
    found = [value for name, value in vars(module).items() if name.startswith("test_")]
    assert found
    return found


@pytest.mark.usefixtures("spark")
def test_scaffolded_operator_has_a_passing_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "operators"
    assert execute(["operator", "new", "fresh_one", "--dir", str(folder)]) == 0
    assert 'operator: "fresh_one:fresh_one"' in capsys.readouterr().out
    monkeypatch.syspath_prepend(str(folder))
    for test in checks_in(importlib.import_module("test_fresh_one")):
        test()
    written = (folder / "fresh_one.py").read_text()
    assert execute(["operator", "new", "fresh_one", "--dir", str(folder)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (folder / "fresh_one.py").read_text() == written


@pytest.mark.parametrize("name", ["daily-totals", "class", "1st", "test_it", "über", "a/b"])
def test_invalid_operator_name_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["operator", "new", name, "--dir", str(tmp_path)]) == 2
    assert "write one like daily_totals" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_built_in_operators_are_listed_without_loading_spark(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["operator", "list", "--output", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    summaries = {each["operator"]: each["summary"] for each in found}
    assert all(summaries[name] for name in ("echo", *PLATFORM, *BUILT_IN))


@pytest.mark.usefixtures("spark")
def test_example_passes_its_documented_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "test_contract_activity", raising=False)
    for test in checks_in(importlib.import_module("test_contract_activity")):
        test()


@pytest.mark.usefixtures("spark")
def test_code_in_the_operators_docs_runs() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "operators.md").read_text()
    module = ModuleType("page")
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/operators.md", "exec"), vars(module))  # noqa: S102 - our own documentation
    for test in checks_in(module):
        test()


def test_every_failure_class_is_in_the_operators_docs() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "operators.md").read_text()
    ours = [kind.__name__ for kind in TaskFailed.__subclasses__() if kind.__module__ == failures.__name__]
    assert [name for name in ours if f"`{name}`" not in page] == []
    assert [name for name in ours if name not in str(failures.__doc__)] == []
