"""Renders rows as JSON and CSV without loss of precision.

Integers up to 2**53 are numbers; larger ones and all decimals are strings. Times are ISO 8601, in UTC if they have a
zone. Binary is base64, an interval is an ISO 8601 duration, NaN and infinities are strings. A map is a list of
[key, value] pairs.
"""

from __future__ import annotations

import base64
import csv
import datetime as dt
import io
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec
import pyarrow as pa

from interlock.errors import InvalidQuery

_EXACT: Final = 2**53
"""Larger integers would be rounded by parsers that use floats."""

Render = Callable[[Any], Any]


def rows_of(batch: pa.RecordBatch) -> list[list[Any]]:
    """Returns rows with values that any JSON encoder supports."""
    if not batch.num_columns:
        return [[] for _ in range(batch.num_rows)]
    try:
        columns = [
            [None if value is None else render(value) for value in _values(column)]
            for column, render in zip(batch.columns, map(_renderer, batch.schema.types), strict=True)
        ]
    except (OverflowError, ValueError):
        raise InvalidQuery(
            "A date or time in the result is out of range: cast it to varchar, or request arrow."
        ) from None
    return [list(row) for row in zip(*columns, strict=True)]


def csv_header(names: Sequence[str]) -> bytes:
    return _csv([list(names)])


def csv_of(batch: pa.RecordBatch) -> bytes:
    """Renders as RFC 4180. Null and empty text are both empty fields; nested values are JSON."""
    return _csv([[_csv_value(value) for value in row] for row in rows_of(batch)])


def _csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_MINIMAL)
    writer.writerows(rows)
    return text.getvalue().encode()


def _csv_value(value: Any) -> Any:
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _values(column: pa.Array) -> list[Any]:
    """Returns the values, with timestamps as integers in their unit, because Python datetimes have no nanoseconds."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_time64(kind):
        return list(column.cast(pa.int64()).to_pylist())
    found = column.storage if isinstance(kind, pa.ExtensionType) else column
    return list(found.to_pylist())


def _renderer(kind: pa.DataType) -> Render:
    """Returns the renderer for the values that `_values` returns for this type."""
    if pa.types.is_timestamp(kind):
        return _timestamp(kind.unit, zoned=kind.tz is not None)
    if pa.types.is_time64(kind):
        return _time(kind.unit)
    return _plain


def _plain(value: Any) -> Any:
    if value is None:
        return None
    render = _RENDER.get(type(value), str)
    return render(value)


def _integer(value: int) -> int | str:
    return value if -_EXACT <= value <= _EXACT else str(value)


def _float(value: float) -> float | str:
    return value if math.isfinite(value) else _word(value)


def _struct(value: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(item) for name, item in value.items()}


def _moment(value: dt.datetime) -> str:
    zoned = value.tzinfo is not None
    return (value.astimezone(dt.UTC) if zoned else value).isoformat().replace("+00:00", "Z")


def _list(values: Sequence[Any]) -> list[Any]:
    return [_plain(value) for value in values]


def _duration(value: Any) -> str:
    seconds, parts = divmod(value.nanoseconds, 10**9)
    return f"P{value.months}M{value.days}DT{seconds}{_fraction(parts, 'ns')}S"


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _fraction(parts: int, unit: str) -> str:
    digits = len(str(_PER_SECOND[unit])) - 1
    return f".{parts:0{digits}d}".rstrip("0").rstrip(".") if parts else ""


def _timestamp(unit: str, *, zoned: bool) -> Render:
    def render(value: int) -> str:
        seconds, parts = divmod(value, _PER_SECOND[unit])
        try:
            moment = dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)  # noqa: DTZ001 - the zone is written below
        except OverflowError:
            return str(value)
        return f"{moment.isoformat()}{_fraction(parts, unit)}{'Z' if zoned else ''}"

    return render


def _time(unit: str) -> Render:
    def render(value: int) -> str:
        seconds, parts = divmod(value, _PER_SECOND[unit])
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{_fraction(parts, unit)}"

    return render


_RENDER: Final[dict[type, Render]] = {
    bool: bool,
    bytes: lambda value: base64.b64encode(value).decode(),
    Decimal: lambda value: format(value, "f"),
    dict: _struct,
    dt.date: dt.date.isoformat,
    dt.datetime: _moment,
    dt.time: dt.time.isoformat,
    float: _float,
    int: _integer,
    list: _list,
    pa.MonthDayNano: _duration,
    tuple: _list,
}
"""Renderers by the Python types that Arrow returns. Entries of a map are tuples."""
