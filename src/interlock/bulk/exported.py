"""An export of a run in a folder here: each file checked against the manifest, each task with what it has ended as."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from interlock.errors import BadRequest
from interlock.wire import ExportFormat, ExportManifest, ExportPart


class _Task(Struct):
    index: int
    status: str


_task = msgspec.json.Decoder(_Task)


def tasks_of(folder: Path) -> Iterator[tuple[int, str]]:
    """By index. Raises BadRequest with a sentence, at the first file that is not what the manifest says."""
    manifest = _manifest(folder)
    for part in sorted(manifest.parts, key=lambda part: part.name):
        path = folder / Path(part.name).name
        _check(path, part)
        yield from _READERS[manifest.format](path)


def _manifest(folder: Path) -> ExportManifest:
    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=ExportManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadRequest(f"{folder} has no manifest of an export: {error}.") from None
    if manifest.format not in _READERS:
        raise BadRequest("An export as zip is not read here: export the run as jsonl or parquet to check it.")
    return manifest


def _check(path: Path, part: ExportPart) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}.") from None
    if found != part.sha256:
        raise BadRequest(f"{path} is not what the manifest says; somebody has changed it, or it was cut off.")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                task = _task.decode(line)
            except msgspec.MsgspecError as error:
                raise BadRequest(f"Line {number} of {path} is no exported task: {error}.") from None
            yield task.index, task.status


def _columns(path: Path) -> Iterator[tuple[int, str]]:
    # Arrow, which no other command pays for.
    import pyarrow.parquet as pq  # noqa: PLC0415

    for batch in pq.ParquetFile(path).iter_batches(columns=["index", "status"]):
        yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


_READERS = {ExportFormat.JSONL: _lines, ExportFormat.PARQUET: _columns}
