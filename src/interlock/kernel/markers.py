"""What the files of an attempt say of themselves, checked before they become a partition.

A file counts only if it lies under the attempt's own prefix and the marker beside it, which is written last, agrees
with what the attempt reports. Then its schema must follow from that of the version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from interlock.access.tokens import write_prefix
from interlock.adapters.objects import Objects
from interlock.adapters.postgres import Connection, Row, queries
from interlock.errors import BadRequest, Conflict, Forbidden, InterlockError
from interlock.schemas import MARKER, MOST_MARKER_BYTES, DatasetSchema, Marker, SchemaClash, evolved, hash_of
from interlock.wire import Completion, Output

_sql = queries("files")
_marker = msgspec.json.Decoder(Marker)
_schema = msgspec.json.Decoder(DatasetSchema)

FILES = "parquet"
"""The storage whose rows are in files."""


@dataclass(frozen=True, slots=True)
class Found:
    """Markers of one completion, by output_index."""

    by_output: Mapping[int, Marker]
    refused: InterlockError | None = None


class Markers:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def of(self, items: Sequence[Completion]) -> dict[UUID, Found]:
        """By task. Before the transaction that commits them: an object store takes its time."""
        wanted = [item for item in items if any(self._has_file(output) for output in item.outputs)]
        found = await asyncio.gather(*(self._of_one(item) for item in wanted))
        return {item.task_id: each for item, each in zip(wanted, found, strict=True)}

    def _has_file(self, output: Output) -> bool:
        return output.start is not None and output.location.startswith(f"{self._objects.root}/")

    async def _of_one(self, item: Completion) -> Found:
        try:
            return Found(
                {
                    output.output_index: await self._read(item, output)
                    for output in item.outputs
                    if self._has_file(output)
                }
            )
        except InterlockError as error:
            return Found({}, error)

    async def _read(self, item: Completion, output: Output) -> Marker:
        prefix = self.prefix(item, output)
        require_under(output.location, prefix)
        raw = await self._objects.read(prefix + MARKER, MOST_MARKER_BYTES)
        if raw is None:
            raise Conflict(
                f"There is no {MARKER} beside {output.location}: a file counts once its marker is written, which is "
                "the last thing that its attempt does.",
                code="marker_missing",
            )
        try:
            marker = _marker.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"{MARKER} beside {output.location} is no marker: {error}.", code="bad_marker") from None
        _check_agreement(output, marker, output.location[len(prefix) :])
        return marker

    def prefix(self, item: Completion, output: Output) -> str:
        root = self._objects.root
        return write_prefix(root, item.task_id, item.attempt, output.dataset_uuid, output.dataset_version)


def require_under(location: str, prefix: str) -> None:
    rest = location.removeprefix(prefix)
    if not location.startswith(prefix) or not rest or "/" in rest or rest in (".", ".."):
        raise Forbidden(
            "The location of an output must be a file right under the attempt's own prefix (`outputs[].write_prefix` "
            "of the task).",
            code="location_outside_prefix",
        )


def _check_agreement(output: Output, marker: Marker, name: str) -> None:
    said = {
        "file": (name, marker.file),
        "row_count": (output.row_count, marker.row_count),
        "bytes": (output.bytes, marker.bytes),
        "schema_hash": (output.schema_hash, hash_of(marker.schema)),
    }
    for what, (reported, written) in said.items():
        if reported is not None and reported != written:
            raise BadRequest(
                f"{what} of the output is {reported}, and {written} in its marker: report what was written.",
                code="marker_differs",
            )


class Schemas:
    """Of the dataset versions that a batch of changes writes. The versions are locked."""

    def __init__(self, versions: Mapping[UUID, Row]) -> None:
        self._versions = versions
        self._known: dict[UUID, DatasetSchema] = {}

    def follow(self, files: Iterable[tuple[UUID, DatasetSchema]]) -> None:
        """Takes in the schemas of an attempt's files, all or none. Raises Conflict when one does not fit."""
        after: dict[UUID, DatasetSchema] = {}
        for version, schema in files:
            before = after.get(version) or self._schema(version)
            after[version] = schema if before is None else _evolved(version, before, schema)
        self._known |= after

    def _schema(self, version: UUID) -> DatasetSchema | None:
        if version in self._known:
            return self._known[version]
        row = self._versions.get(version)
        return None if row is None or row["schema"] is None else _schema.decode(row["schema"])

    async def write(self, connection: Connection) -> None:
        hashes = {version: hash_of(schema) for version, schema in self._known.items()}
        changed = [version for version in hashes if self._versions[version]["schema_hash"] != hashes[version]]
        if changed:
            await _sql.set_schemas(
                connection,
                versions=changed,
                schemas=[msgspec.json.encode(self._known[version]).decode() for version in changed],
                hashes=[hashes[version] for version in changed],
            )


def _evolved(version: UUID, before: DatasetSchema, after: DatasetSchema) -> DatasetSchema:
    try:
        return evolved(before, after)
    except SchemaClash as clash:
        raise Conflict(
            f"The file does not fit to dataset version {version}: {clash}. Only columns that may be null can join; for "
            "anything else change the job's definition and deploy it, which makes a new version.",
            code="schema_mismatch",
        ) from None
