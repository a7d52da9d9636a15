"""Dataset files as an attempt writes them, for tests of their metadata only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from interlock.schemas import MARKER, Column, DatasetSchema, Marker, hash_of

PLAIN = DatasetSchema([Column("block_number", "bigint", nullable=False)], "block_number")


def path_of(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def marked(
    prefix: str, name: str = "part", schema: DatasetSchema = PLAIN, rows: int = 0, **facts: Any
) -> dict[str, Any]:
    """Writes a file and its marker under an attempt's prefix. Returns the fields of its Output."""
    folder = path_of(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"")
    marker = Marker(file=name, row_count=rows, bytes=0, schema=schema, **facts)
    (folder / MARKER).write_bytes(msgspec.json.encode(marker))
    return {"location": prefix + name, "row_count": rows, "bytes": 0, "schema_hash": hash_of(schema)}
