"""The operators that a worker was given, found in its folders and modules without running any of their code.

    --operators DIR      every module below the folder, named as Python imports it from there
    --operators MODULE   that module; of a package, its modules too

A function is an operator when it stands at the top level of such a module and is decorated with `operator`. The wrapper
reads the source only: operator code never runs in the process that holds the worker token.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

from interlock.errors import ConfigurationError

MOST_ENTRIES: Final = 20_000
"""Files and folders that one scan looks at."""
MOST_OPERATORS: Final = 2_000
"""Operators that one worker reports."""
MOST_BYTES: Final = 1 << 20
"""Of one source file; a longer one declares nothing."""
RESCAN_SECONDS: Final = 1.0
"""Unknown names make a process scan again, at most this often."""
_PLATFORM: Final = Path(__file__).resolve().parents[1]
_EXAMPLES: Final = _PLATFORM / "examples"
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
_NAME: Final = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)", re.ASCII)
_WRITABLE: Final = re.compile(r"(?=.{1,200}\Z)[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?", re.ASCII)
"""What a job may write as the name of an operator."""
_DECORATED: Final = re.compile(rb"^@[ \t]*(?:[A-Za-z_][\w.]*\.)?operator\b", re.MULTILINE)


class OperatorNotFound(Exception):
    """There is no such operator here; the message says what is missing."""


class Kind(StrEnum):
    """Which of the two decorators declares it: their arguments tell them apart."""

    PLATFORM = "platform"
    """`@operator` and `@operator("name")` of interlock.workers."""
    SPARK = "spark"
    """`@operator(inputs=…, output=…)` of interlock.pipeline."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A declared operator, as its source says."""

    module: str
    function: str
    kind: Kind
    short_name: str | None
    """The name that `@operator` registers, without a module."""
    file: Path

    @property
    def name(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass(frozen=True, slots=True)
class Source:
    """One value of --operators."""

    root: Path
    """A folder, or the file of a module."""
    search_path: Path
    """The folder that Python imports it from."""
    module: str = ""
    """Empty for a folder."""

    @property
    def text(self) -> str:
        return self.module or str(self.root)


def sources(given: Iterable[str]) -> tuple[Source, ...]:
    """Reads values of --operators. Raises ConfigurationError for what is neither a folder nor a module."""
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
        "name the folder that has your operators, or a module that is installed or on PYTHONPATH."
    )


def _module_file(name: str, path: Sequence[str] | None = None) -> Path | None:
    """The source file that Python would import, found without importing anything, not even its packages."""
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
    """The operators of some sources. Scanned when first asked for, and again when a name is unknown."""

    def __init__(self, given: Sequence[Source], kind: Kind, reserved: Iterable[str] = ()) -> None:
        self.sources = tuple(given)
        self._kind, self._reserved = kind, frozenset(reserved)
        self._declared: dict[str, Declared] = {}
        self._scanned_at = float("-inf")
        self.truncated = False

    def names(self) -> list[str]:
        """Scans, and returns every name that a job may use, in order."""
        self._scan()
        return sorted(name for name in self._declared if _WRITABLE.fullmatch(name))[:MOST_OPERATORS]

    def find(self, name: str) -> Declared:
        """Raises OperatorNotFound."""
        found = self._find(name)
        if found is not None:
            return found
        near = get_close_matches(name, self._declared, 3, 0.6)
        shown = f" The nearest names are {', '.join(near)}." if near else ""
        given = ", ".join(source.text for source in self.sources) or "none"
        raise OperatorNotFound(
            f"no operator {name!r} in this worker: declare the function with @operator at the top level of a module, "
            f"and start the worker with --operators and its folder or module (given here: {given}).{shown}"
        )

    def _find(self, name: str) -> Declared | None:
        parts = _NAME.fullmatch(name)
        if parts is None:
            return self._by_short_name(name)
        module, function = parts["module"], parts["function"]
        for source in self.sources:
            for file in _files_of(source, module):
                for declared in _declared_in(file, module, *_stamp(file)):
                    if declared.function == function and declared.kind is self._kind:
                        return declared
        if time.monotonic() - self._scanned_at > RESCAN_SECONDS:
            self._scan()  # for the nearest names
        return None

    def _by_short_name(self, name: str) -> Declared | None:
        found = self._declared.get(name)
        if found is None and time.monotonic() - self._scanned_at > RESCAN_SECONDS:
            self._scan()
            found = self._declared.get(name)
        return found

    def _scan(self) -> None:
        budget = _Budget(MOST_ENTRIES)
        found: dict[str, Declared] = {}
        for source in self.sources:
            for module, file in _modules(source, budget):
                found |= {one.name: one for one in _declared_in(file, module, *_stamp(file)) if one.kind is self._kind}
        self.truncated = budget.left <= 0 or len(found) > MOST_OPERATORS
        # A short name that two functions claim is nobody's: each keeps module:function.
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

    The module must come from the very file that declares it: a file named like a module of the standard library, or
    like one that stands earlier on the search path, would otherwise run code that nobody gave to the worker.
    """
    known = sys.modules.get(declared.module)
    where = _origin(known) if known is not None else _module_file(declared.module, sys.path)
    if declared.module.partition(".")[0] in sys.builtin_module_names or where != declared.file:
        raise OperatorNotFound(
            f"operator {declared.name!r} is declared in {declared.file}, and Python imports {declared.module} from "
            f"{where or 'the standard library'}: rename the file"
        )
    try:
        module = importlib.import_module(declared.module)
        found: object = vars(module)[declared.function]
    except Exception as error:
        raise OperatorNotFound(
            f"cannot load operator {declared.name!r} ({type(error).__name__}: {error}): check that {declared.file} can "
            "be imported where the worker runs"
        ) from error
    if _origin(module) != declared.file or getattr(found, "__module__", None) != declared.module:
        raise OperatorNotFound(f"operator {declared.name!r} is not a function of {declared.file}: declare it there")
    return found


def extend_search_path(given: Iterable[Source]) -> None:
    """Makes the sources importable in this process and in the Python processes that it starts."""
    present = {os.path.realpath(entry or Path.cwd()) for entry in sys.path}
    added = [path for path in dict.fromkeys(str(source.search_path) for source in given) if path not in present]
    sys.path[:0] = added
    if added:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, before] if before else added)


def _origin(module: ModuleType) -> Path | None:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    return Path(origin).resolve() if isinstance(origin, str) and origin.endswith(".py") else None


def _files_of(source: Source, module: str) -> Iterator[Path]:
    """The file that a module of this source would have, where it is one that a scan would read."""
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
    """Files and folders that a scan may still look at."""

    left: int


def _modules(source: Source, budget: _Budget) -> Iterator[tuple[str, Path]]:
    """Modules below a source with their files, by name, as far as the budget reaches."""
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
    """A link that leads out of the folder is not a file of it, and the platform's own functions are not for jobs."""
    if not file.is_file():
        return False
    real = file.resolve()
    platform = real.is_relative_to(_PLATFORM) and not real.is_relative_to(_EXAMPLES)
    return real.is_relative_to(search_path) and not platform


def _stamp(file: Path) -> tuple[int, int, int]:
    """Changes with the content."""
    try:
        about = file.stat()
    except OSError:
        return (0, 0, 0)
    return about.st_mtime_ns, about.st_size, about.st_ino


@lru_cache(maxsize=MOST_ENTRIES)
def _declared_in(file: Path, module: str, *_stamp: int) -> tuple[Declared, ...]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES or not _DECORATED.search(content):
            return ()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # what Python cannot import declares nothing
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
            for decorator in node.decorator_list:
                if (what := _declaration(decorator, node.name)) is not None:
                    found[node.name] = Declared(module, node.name, what[0], what[1], file)
    return tuple(found.values())


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
