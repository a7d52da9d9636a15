"""Refusal of operator names that refer to functions outside the files and modules given to the worker."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import ConfigurationError
from interlock.spark import operators as spark
from interlock.workers import OperatorNotFound, catalogue, operators
from tests.workers.test_operators import context

OWN = """
import os, subprocess
from os import path
from interlock.workers import operator
from interlock.workers.operators import echo, python
from interlock.spark import operator as spark_operator

class Holder:
    os = os
    @operator
    def method(payload, ctx): return payload

@operator
def good(payload, ctx):
    return payload

def plain(payload, ctx):
    return payload

def outer():
    @operator
    def inner(payload, ctx): return payload
    return inner

alias = good
run = subprocess.run
_lambda = operator("anonymous")(lambda payload, ctx: payload)
"""
LATER = "from interlock.workers import operator\n\n@operator\nasync def later(payload, ctx):\n    return payload\n"
OTHER = """
from pkg.own import good, plain
import pkg.own as own

def operator(function):
    return function

@operator
def pretended(payload, ctx):
    return payload
"""
SHADOW = "from interlock.workers import operator\n\n@operator\ndef run(payload, ctx):\n    return payload\n"
SPARK = """
from interlock.spark import operator

@operator(inputs={})
def on_spark(ctx):
    return 1
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with declared operators and many undeclared functions."""
    folder = tmp_path_factory.mktemp("project")
    package = folder / "pkg"
    for place, text in {
        package / "__init__.py": "",
        package / "own.py": OWN,
        package / "later.py": LATER,
        package / "other.py": OTHER,
        package / "on_spark.py": SPARK,
        folder / "subprocess.py": SHADOW,
        folder / "sys.py": SHADOW,
        folder / "__main__.py": SHADOW,
        folder / "torn.py": SHADOW + "def (",
        folder / ".hidden" / "secret.py": SHADOW,
        folder / "node_modules" / "script.py": SHADOW,
        folder / "__pycache__" / "cached.py": SHADOW,
        folder / "environment" / "pyvenv.cfg": "",
        folder / "environment" / "lib" / "module.py": SHADOW,
        folder.parent / "outside.py": SHADOW,
    }.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (folder / "linked.py").symlink_to(folder.parent / "outside.py")
    (folder / "leaving").symlink_to(folder.parent)
    before = list(sys.path)
    sources = catalogue.sources([str(folder)])
    sys.path.insert(0, str(folder))
    operators.give(sources)
    spark.give(sources)
    yield folder
    operators.give(())
    spark.give(())
    sys.path[:] = before


STANDARD = [
    f"{module}:{function}"
    for module, functions in {
        "cProfile": ["run", "runctx"],
        "subprocess": ["getoutput", "run", "Popen", "check_output", "call"],
        "linecache": ["getlines", "getline", "updatecache"],
        "os": ["system", "popen", "listdir", "remove", "path.join", "execv"],
        "builtins": ["eval", "exec", "open", "compile", "__import__"],
        "runpy": ["run_path", "run_module"],
        "timeit": ["timeit"],
        "pickle": ["loads"],
        "shutil": ["rmtree", "copyfile"],
        "pathlib": ["Path", "Path.read_text"],
        "importlib": ["import_module", "util.find_spec"],
        "code": ["interact"],
        "pdb": ["run"],
        "trace": ["Trace"],
        "ctypes": ["CDLL", "cdll.LoadLibrary"],
        "multiprocessing": ["Process"],
        "urllib.request": ["urlopen"],
        "socket": ["create_connection"],
        "webbrowser": ["open"],
        "ast": ["literal_eval"],
        "logging.config": ["listen"],
        "antigravity": ["geohash"],
        "this": ["s"],
        "sys": ["exit", "modules.clear"],
    }.items()
    for function in functions
]
INSTALLED = [
    "msgspec.json:decode",
    "pyarrow:open_input_stream",
    "pyspark:SparkContext",
    "interlock.cli.app:main",
    "interlock.workers.operators:echo",
    "interlock.workers.operators:python",
    "interlock.spark.platform.list_load:list_load",
    "interlock.workers.block_follower.operator:block_follower",
    "interlock.settings:load",
    "pytest:main",
    "pip:main",
]
OWN_BUT_NOT_DECLARED = [
    *(
        f"pkg.own:{name}"
        for name in ("plain", "Holder", "Holder.method", "Holder.os.system", "os", "os.system", "path")
    ),
    *(f"pkg.own:{name}" for name in ("subprocess", "subprocess.run", "run", "alias", "echo", "python", "operator")),
    *(f"pkg.own:{name}" for name in ("outer", "inner", "outer.inner", "_lambda", "good.__call__", "good.__globals__")),
    *(f"pkg.own:{name}" for name in ("__builtins__", "__loader__", "__spec__", "__name__", "good.__code__")),
    *("pkg.other:good", "pkg.other:own", "pkg.other:own.good", "pkg.other:plain", "pkg.other:pretended"),
    *("anonymous", "method", "inner", "plain", "__main__:run", "__main__:good", "torn:run", "secret:run"),
    *(".hidden.secret:run", "script:run", "node_modules.script:run", "cached:run", "environment.lib.module:run"),
    *("lib.module:run", "linked:run", "leaving.outside:run", "outside:run", "pkg.on_spark:on_spark", "on_spark"),
    *("pkg.later:later", "later"),
]
SPELLINGS = [
    *("", ":", "::", "pkg.own:", ":good", "pkg.own::good", "pkg.own:good:", " pkg.own:good", "pkg.own:good "),
    *("pkg.own:good\n", "pkg.own\x00:good", "pkg/own:good", "pkg\\own:good", "./pkg.own:good", "..pkg.own:good"),
    *(".pkg.own:good", "pkg..own:good", "pkg.own.:good", "PKG.own:good", "pkg.own.py:good", "pkg.own:Good"),
    *("pkg.own:good()", "pkg.own:good,plain", "pkg.own:*", "pkg.*:good", "pkg.own#good", "pkg.own.good"),
    *("pkg.own:\uff47ood", "pkg.\u043ewn:good", "pkg.own:goo\u200bd", "file:///etc/passwd", "/etc/passwd:read", "~:x"),
    *("../outside:run", "pkg.own:good.__wrapped__", "pkg.own:good;import os", "0:0", "pkg.own:1", "-m:run"),
    *("a" * 5_000, "a." * 500 + "b:c", "pkg.own:" + "a" * 5_000),
]


@pytest.mark.parametrize("name", [*STANDARD, *INSTALLED, *OWN_BUT_NOT_DECLARED, *SPELLINGS])
@pytest.mark.usefixtures("project")
def test_name_of_an_undeclared_function_is_refused(name: str) -> None:
    loaded = set(sys.modules)
    with pytest.raises(OperatorNotFound):
        operators.resolve(name)
    with pytest.raises(OperatorNotFound):
        operators.resolve("python")(None, context(config=json.dumps({"function": name}).encode()))
    if name != "pkg.on_spark:on_spark":
        with pytest.raises(OperatorNotFound):
            spark.resolve_declared(name)
    # A refused name may load a file that declares another operator, but never any other module.
    assert {one for one in set(sys.modules) - loaded if not one.startswith("pkg")} <= {"interlock.spark.columns"}


@pytest.mark.usefixtures("project")
def test_functions_of_installed_modules_are_refused() -> None:
    """Tries every top-level module of the interpreter with common names of functions."""
    names = {one.name for one in pkgutil.iter_modules()} | set(sys.stdlib_module_names)
    refused = 0
    for module in names - {"pkg"}:
        for function in ("run", "main", "open", "__import__"):
            with pytest.raises(OperatorNotFound):
                operators.resolve(f"{module}:{function}")
            refused += 1
    assert refused > 1_000


@pytest.mark.usefixtures("project")
@given(st.text(alphabet=st.sampled_from("pkg.own:god_sy/\\ \x00-0é"), max_size=30))
def test_only_the_declared_spelling_is_found(name: str) -> None:
    if name in ("pkg.own:good", "good"):
        return
    with pytest.raises(OperatorNotFound):
        operators.resolve(name)


@pytest.mark.usefixtures("project")
def test_declared_function_is_found_by_both_names() -> None:
    assert operators.resolve("pkg.own:good")(7, context()) == 7
    assert operators.resolve("good")(7, context()) == 7
    assert operators.resolve("python")(7, context(config=b'{"function": "pkg.own:good"}')) == 7
    assert spark.resolve("pkg.on_spark:on_spark").declaration.inputs == {}


def test_file_that_shadows_a_module_is_refused(project: Path) -> None:
    with pytest.raises(OperatorNotFound, match="rename the file"):
        operators.resolve("subprocess:run")
    with pytest.raises(OperatorNotFound, match="rename the file"):
        operators.resolve("sys:run")
    assert Path(subprocess.__file__).parent != project


def test_scan_reports_only_declared_functions(project: Path) -> None:
    sources = catalogue.sources([str(project)])
    assert set(operators.catalogue_of(sources, spark=True).names()) == {"pkg.on_spark:on_spark"}
    # `pretended` and the shadowing files look declared; the worker refuses them when it loads them.
    assert set(operators.catalogue_of(sources, spark=False).names()) == {
        "good",
        "pkg.own:good",
        "pkg.other:pretended",
        "pretended",
        "subprocess:run",
        "sys:run",
    }


def test_module_source_includes_its_submodules(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    loaded = set(sys.modules)
    whole = operators.catalogue_of(catalogue.sources(["pkg"]), spark=False).names()
    one = operators.catalogue_of(catalogue.sources(["pkg.other"]), spark=False).names()
    assert ("pkg.own:good" in whole, "pkg.other:pretended" in whole, "subprocess:run" in whole) == (True, True, False)
    assert one == ["pkg.other:pretended", "pretended"]
    assert set(sys.modules) - loaded == set()


@pytest.mark.parametrize("text", ["no_such_module", "no/such/folder", "a b", "os.no_such", "builtins"])
def test_missing_source_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="neither a folder nor a Python module"):
        catalogue.sources([text])


def test_standard_library_module_declares_no_operators() -> None:
    found = catalogue.sources(["json", "wave", "interlock.workers.operators", "interlock"])
    assert operators.catalogue_of(found, spark=False).names() == []
    assert operators.catalogue_of(found, spark=True).names() == []


def test_new_function_is_found_by_an_existing_catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"grown_{uuid4().hex}"
    monkeypatch.syspath_prepend(str(tmp_path))
    found = operators.catalogue_of(catalogue.sources([str(tmp_path)]), spark=False)
    assert found.names() == []
    (tmp_path / f"{module}.py").write_text(SHADOW)
    assert found.names() == [f"{module}:run", "run"]
    (tmp_path / f"{module}.py").unlink()
    assert found.names() == []
