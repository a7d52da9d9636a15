"""Finds the operators in the folders and modules of a worker without running their code, and reports them.

    --operators DIR      every module below the folder, under the name by which Python imports it from there
    --operators MODULE   that module; for a package, also its modules

A function is an operator if it is defined at the top level of such a module and decorated with `operator`. The wrapper
only reads the source: operator code never runs in the process that holds the worker token.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

import structlog

from interlock.client import WorkerClient
from interlock.errors import ConfigurationError, NotFound
from interlock.wire.tasks import OperatorsReport

MAX_ENTRIES: Final = 20_000
"""Files and folders that one scan visits."""
MAX_OPERATORS: Final = 2_000
"""Operators that one worker reports."""
MAX_BYTES: Final = 1 << 20
"""Largest source file. Operators in a larger one are not found."""
RESCAN_SECONDS: Final = 1.0
"""Shortest interval of rescans, which unknown names cause."""
_PLATFORM: Final = Path(__file__).resolve().parents[1]
_EXAMPLES: Final = _PLATFORM / "examples"
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_NAME: Final = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)", re.ASCII)
_WRITABLE: Final = re.compile(r"(?=.{1,200}\Z)[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?", re.ASCII)
"""Names of operators that a job may use."""
_DECORATED: Final = re.compile(rb"^@[ \t]*(?:[A-Za-z_][\w.]*\.)?operator\b", re.MULTILINE)


class OperatorNotFound(Exception):
    """The worker has no such operator. The message says what is missing."""


class Kind(StrEnum):
    """The decorator that declares the operator. The two have different arguments."""

    PLATFORM = "platform"
    """`@operator` and `@operator("name")` of interlock.workers."""
    SPARK = "spark"
    """`@operator(inputs=…, output=…)` of interlock.spark."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared operator, read from its source."""

    module: str
    function: str
    kind: Kind
    short_name: str | None
    """The name without a module that `@operator` registers."""
    file: Path

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass(frozen=True, slots=True)
class Source:
    """A value of --operators."""

    root: Path
    """A folder, or the file of a module."""
    search_path: Path
    """The folder from which Python imports it."""
    module: str = ""
    """Empty for a folder."""

    @property
    def text(self) -> str:
        return self.module or str(self.root)


def sources(given: Iterable[str]) -> tuple[Source, ...]:
    """Reads values of --operators. Raises ConfigurationError for a value that is neither a folder nor a module."""
    return tuple(dict.fromkeys(_source(text) for text in given))


def _source(text: str) -> Source:
    folder = Path(text).absolute()
    if folder.is_dir() and not (folder / "__init__.py").is_file():
        return Source(folder.resolve(), folder.resolve())
    spec_path = _module_file(text) if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", text, re.ASCII) else None
    if spec_path is not None:
        depth = text.count(".") + (spec_path.name == "__init__.py")
        return Source(spec_path, spec_path.parents[depth], text)
    if folder.is_dir():
        return Source(folder.resolve(), folder.resolve())
    raise ConfigurationError(
        f"--operators {text!r} is neither a folder nor a Python module that can be imported from {Path.cwd()}: "
        "pass the folder that contains your operators, or a module that is installed or on PYTHONPATH."
    )


def _module_file(name: str, path: Sequence[str] | None = None) -> Path | None:
    """Returns the source file that Python would import, without importing anything, not even its parent packages."""
    search: Sequence[str] | None = [str(Path.cwd()), *sys.path] if path is None else path
    origin: str | None = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, None if search is None else list(search))
        if spec is None:
            return None
        origin = spec.origin
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    return Path(origin).resolve() if origin is not None and origin.endswith(".py") else None


class Catalogue:
    """The operators of some sources. They are scanned on first use, and again if a name is unknown."""

    def __init__(self, given: Sequence[Source], kind: Kind, reserved: Iterable[str] = ()) -> None:
        self.sources = tuple(given)
        self._kind, self._reserved = kind, frozenset(reserved)
        self._declared: dict[str, Declared] = {}
        self._scanned_at = float("-inf")
        self.truncated = False

    def names(self) -> list[str]:
        """Scans the sources and returns every name that a job may use, sorted."""
        self._scan()
        return sorted(name for name in self._declared if _WRITABLE.fullmatch(name))[:MAX_OPERATORS]

    def find(self, name: str) -> Declared:
        """Returns the operator with this name. Raises OperatorNotFound."""
        found = self._find(name)
        if found is not None:
            return found
        near = get_close_matches(name, self._declared, 3, 0.6)
        shown = f" The nearest names are {', '.join(near)}." if near else ""
        given = ", ".join(source.text for source in self.sources) or "none"
        raise OperatorNotFound(
            f"This worker has no operator {name!r}: declare the function with @operator at the top level of a module, "
            f"and start the worker with --operators and its folder or module (now: {given}).{shown}"
        )

    def _find(self, name: str) -> Declared | None:
        parts = _NAME.fullmatch(name)
        if parts is None:
            return self._by_short_name(name)
        self._require_syntax(parts["module"])
        module, function = parts["module"], parts["function"]
        for source in self.sources:
            for file in _files_of(source, module):
                for declared in _declared_in(file, module, *_stamp(file)):
                    if declared.function == function and declared.kind is self._kind:
                        return declared
        if time.monotonic() - self._scanned_at > RESCAN_SECONDS:
            self._scan()  # to suggest the nearest names
        return None

    def _require_syntax(self, module: str) -> None:
        """Raises OperatorNotFound with the line of the mistake, for a module that Python cannot read."""
        for source in self.sources:
            for file in _files_of(source, module):
                if (mistake := _mistake_in(file, *_stamp(file))) is not None:
                    raise OperatorNotFound(f"{module!r} cannot be loaded: {mistake}. Correct the file.")

    def _by_short_name(self, name: str) -> Declared | None:
        found = self._declared.get(name)
        if found is None and time.monotonic() - self._scanned_at > RESCAN_SECONDS:
            self._scan()
            found = self._declared.get(name)
        return found

    def _scan(self) -> None:
        budget = _Budget(MAX_ENTRIES)
        found: dict[str, Declared] = {}
        for source in self.sources:
            for module, file in _modules(source, budget):
                found |= {one.name: one for one in _declared_in(file, module, *_stamp(file)) if one.kind is self._kind}
        self.truncated = budget.left <= 0 or len(found) > MAX_OPERATORS
        # A short name that two functions declare is dropped. Both keep module:function.
        claims = Counter(name for name, _, _ in {(one.short_name, one.file, one.function) for one in found.values()})
        short = {
            one.short_name: one
            for one in found.values()
            if one.short_name is not None and claims[one.short_name] == 1 and one.short_name not in self._reserved
        }
        self._declared = found | {name: one for name, one in short.items() if ":" not in name}
        self._scanned_at = time.monotonic()


def load(declared: Declared) -> object:
    """Imports the module of a declared operator and returns the function. Raises OperatorNotFound.

    The module must come from the file that declares the operator. Otherwise, a file with the name of a module that is
    in the standard library or earlier on the search path would run code that was not given to the worker.
    """
    known = sys.modules.get(declared.module)
    where = _origin(known) if known is not None else _module_file(declared.module, sys.path)
    if declared.module.partition(".")[0] in sys.builtin_module_names or where != declared.file:
        raise OperatorNotFound(
            f"Operator {declared.name!r} is declared in {declared.file}, but Python imports {declared.module} from "
            f"{where or 'the standard library'}: rename the file."
        )
    try:
        module = importlib.import_module(declared.module)
        found: object = vars(module)[declared.function]
    except Exception as error:
        raise OperatorNotFound(
            f"Operator {declared.name!r} cannot be loaded ({type(error).__name__}: {error}): check that "
            f"{declared.file} can be imported on the worker's machine."
        ) from error
    if _origin(module) != declared.file or getattr(found, "__module__", None) != declared.module:
        raise OperatorNotFound(
            f"Operator {declared.name!r} is not a function that {declared.file} defines: define it there."
        )
    return found


def extend_search_path(given: Sequence[Source]) -> None:
    """Makes the sources, and then the working directory, importable here and in Python processes started from here.

    Call it after the process is confined. Without sources, only the platform's code is importable.
    """
    present = {os.path.realpath(entry or Path.cwd()) for entry in sys.path}
    folders = [str(source.search_path) for source in given] + ([str(Path.cwd().resolve())] if given else [])
    added = [path for path in dict.fromkeys(folders) if path not in present]
    sys.path[:0] = added
    if added:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, before] if before else added)


def _origin(module: ModuleType) -> Path | None:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    return Path(origin).resolve() if isinstance(origin, str) and origin.endswith(".py") else None


def _files_of(source: Source, module: str) -> Iterator[Path]:
    """Yields the file that a module of this source would have, if a scan would read it."""
    if source.module and module != source.module and not module.startswith(f"{source.module}."):
        return
    parts = module.split(".")
    if any(_is_skipped(part) for part in parts):
        return
    folder = source.search_path
    for part in parts[:-1]:
        folder /= part
        if _is_environment(folder) or folder.is_symlink():
            return
    for file in (folder / f"{parts[-1]}.py", folder / parts[-1] / "__init__.py"):
        if _is_own_file(file, source.search_path) and not file.parent.is_symlink():
            yield file.resolve()


@dataclass
class _Budget:
    """Files and folders that a scan may still visit."""

    left: int


def _modules(source: Source, budget: _Budget) -> Iterator[tuple[str, Path]]:
    """Yields modules below a source with their files, by name, until the budget is used up."""
    if source.module and source.root.name != "__init__.py":
        if _is_own_file(source.root, source.search_path):
            yield source.module, source.root
        return
    top = source.root.parent if source.module else source.root
    for folder, folders, files in os.walk(top):
        budget.left -= 1 + len(files)
        if budget.left <= 0:
            return
        at = Path(folder)
        folders[:] = sorted(name for name in folders if name.isidentifier() and not _is_skipped(name))
        folders[:] = [name for name in folders if not _is_environment(at / name)]
        for name in sorted(files):
            module = _module_name(at / name, source.search_path)
            if module is not None and _is_own_file(at / name, source.search_path):
                yield module, (at / name).resolve()


def _module_name(file: Path, search_path: Path) -> str | None:
    if file.suffix != ".py":
        return None
    parts = list(file.relative_to(search_path).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    if not parts or not all(part.isidentifier() and not _is_skipped(part) for part in parts):
        return None
    return ".".join(parts)


def _is_skipped(name: str) -> bool:
    return name in _SKIPPED or name.startswith((".", "__"))


def _is_environment(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()


def _is_own_file(file: Path, search_path: Path) -> bool:
    """Excludes links that lead out of the folder, and the platform's own modules, which are not for jobs."""
    if not file.is_file():
        return False
    real = file.resolve()
    platform = real.is_relative_to(_PLATFORM) and not real.is_relative_to(_EXAMPLES)
    return real.is_relative_to(search_path) and not platform


def is_own_module(file: Path, search_path: Path) -> bool:
    """Returns True for a file of the user's code below a folder: no installed package, and not the platform's."""
    if not file.is_relative_to(search_path) or file.suffix != ".py":
        return False
    parts = file.relative_to(search_path).parts
    platform = file.is_relative_to(_PLATFORM) and not file.is_relative_to(_EXAMPLES)
    return not platform and not any(part in _SKIPPED or part.startswith(".") for part in parts)


def _stamp(file: Path) -> tuple[int, int, int]:
    """Returns a value that changes with the content of the file."""
    try:
        about = file.stat()
    except OSError:
        return (0, 0, 0)
    return about.st_mtime_ns, about.st_size, about.st_ino


@lru_cache(maxsize=MAX_ENTRIES)
def _declared_in(file: Path, module: str, *_stamp: int) -> tuple[Declared, ...]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES or not _DECORATED.search(content):
            return ()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # Python cannot import the file either
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            for decorator in node.decorator_list:
                if (what := _declaration(decorator, node.name)) is not None:
                    found[node.name] = Declared(module, node.name, what[0], what[1], file)
    return tuple(found.values())


@lru_cache(maxsize=MAX_ENTRIES)
def _mistake_in(file: Path, *_stamp: int) -> str | None:
    """Returns file, line and message of a syntax error."""
    try:
        ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return f"{error.msg} ({file}, line {error.lineno})"
    except (OSError, ValueError, RecursionError, MemoryError):
        return None  # the import reports it
    return None


def _declaration(decorator: ast.expr, function: str) -> tuple[Kind, str | None] | None:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    last = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else None
    if last != "operator":
        return None
    if not isinstance(decorator, ast.Call):
        return Kind.PLATFORM, function
    if not decorator.args:
        return Kind.SPARK, None
    value = decorator.args[0].value if isinstance(decorator.args[0], ast.Constant) else None
    return Kind.PLATFORM, value if isinstance(value, str) else None


log = structlog.get_logger()

LOOK_SECONDS: Final = 2.0
"""Pause between two scans of the sources. A new operator is usable after this time."""
REPORT_SECONDS: Final = 20.0


class OperatorReports:
    def __init__(
        self,
        client: WorkerClient,
        catalogue: Catalogue,
        queue: str,
        worker_id: str,
        on_change: Callable[[], None] = lambda: None,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """`on_change` is called before a report if operators were added or removed since the last one."""
        self._client, self._catalogue, self._on_change = client, catalogue, on_change
        self._queue, self._worker_id = queue, worker_id
        self._look_seconds = look_seconds
        self._reported: list[str] | None = None
        self._reported_at = 0.0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await self.run_once()
            # Large folders are scanned less often: scans take at most a twentieth of a core.
            await asyncio.sleep(max(self._look_seconds, 20 * (time.monotonic() - began)))

    async def run_once(self) -> None:
        """Reports if the operators changed, or if the last report is old."""
        names = await asyncio.to_thread(self._catalogue.names)
        due = time.monotonic() - self._reported_at >= REPORT_SECONDS
        if names == self._reported and not due:
            return
        if names != self._reported:
            self._log(names)
            if self._reported is not None:
                self._on_change()
        try:
            report = OperatorsReport(queue=self._queue, worker_id=self._worker_id, operators=names)
            await self._client.report_operators(report)
        except NotFound:
            # The dispatcher has an older version. It does not check names, so only the worker does.
            log.warning("worker.operators_not_reported", reason="the dispatcher has no endpoint for these reports")
        self._reported, self._reported_at = names, time.monotonic()

    def _log(self, names: list[str]) -> None:
        log.info("worker.operators", operators=len(names), sources=[one.text for one in self._catalogue.sources])
        if self._catalogue.truncated:
            log.warning(
                "worker.operators_left_out",
                limit=MAX_OPERATORS,
                hint="the folders contain too many files or operators: pass smaller ones with --operators",
            )
