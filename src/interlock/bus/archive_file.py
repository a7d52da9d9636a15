"""The file of a part of the archive: accepted commands as rows, in the order in which they were owed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import UnsetType

from interlock.bus.archived import ArchivedCommand
from interlock.schemas import Column, DatasetSchema

_TIME: Final = pa.timestamp("us", tz="UTC")
_COLUMNS: Final = (
    ("position", pa.int64(), "bigint", False),
    ("command_id", pa.string(), "string", False),
    ("source", pa.string(), "string", False),
    ("target", pa.string(), "string", False),
    ("name", pa.string(), "string", False),
    ("timestamp", _TIME, "timestamp", False),
    ("accepted_at", _TIME, "timestamp", False),
    ("version_id", pa.string(), "string", False),
    ("payload", pa.string(), "string", False),
    ("replay_id", pa.string(), "string", True),
    ("replay_reason", pa.string(), "string", True),
)
_ARROW: Final = pa.schema([pa.field(name, kind, nullable=nullable) for name, kind, _, nullable in _COLUMNS])

SCHEMA: Final = DatasetSchema([Column(name, kind, nullable) for name, _, kind, nullable in _COLUMNS], "position")


def parquet(commands: Sequence[ArchivedCommand], position: int) -> bytes:
    rows = [_row(command, at) for at, command in enumerate(commands, position)]
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, _ARROW, compression="zstd", store_schema=False, write_page_index=True) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=_ARROW))
    return bytes(sink.getvalue())


def _row(command: ArchivedCommand, position: int) -> dict[str, object]:
    return {
        "position": position,
        "command_id": str(command.command_id),
        "source": command.source,
        "target": command.target,
        "name": command.name,
        "timestamp": command.timestamp,
        "accepted_at": command.accepted_at,
        "version_id": command.version_id,
        "payload": bytes(command.payload).decode(),
        "replay_id": None if isinstance(command.replay_id, UnsetType) else str(command.replay_id),
        "replay_reason": None if isinstance(command.replay_reason, UnsetType) else command.replay_reason,
    }
