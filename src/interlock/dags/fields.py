"""Reads YAML mappings against their known fields, and texts with a format of their own, and reports every problem."""

from __future__ import annotations

import functools
import re
import zoneinfo
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, TypeGuard, get_args

import msgspec
from croniter import croniter
from msgspec.structs import FieldInfo

from interlock.dags.definition import PATH_NAME, DurationSeconds
from interlock.dags.yaml_nodes import Fields, Items, Node, Place, Report, Scalar, kind_of, listing, plain, quoted
from interlock.schemas import TABLE_TYPES, table_type
from interlock.wire.base import OperatorName

Converter = Callable[[Node], Any]
"""Any: the result has the type of the field. Raises Malformed, or reports a problem and raises Rejected."""

EXAMPLES: Final = {
    "activation": "activation: source",
    "auth": "auth: hmac",
    "backoff_cap_seconds": "backoff_cap_seconds: 300",
    "backoff_factor": "backoff_factor: 2",
    "backoff_seconds": "backoff_seconds: 1",
    "catch_up": "catch_up: latest",
    "columns": "columns: { id: bigint not null, name: string }",
    "config": "config: { table: logs }",
    "dataset": "dataset: transfers",
    "defaults": "defaults: { max_attempts: 3 }",
    "every": "every: daily",
    "execution_strategy": "execution_strategy: PerPartition",
    "from": "from: { job: follow, output: logs }",
    "heartbeat_timeout_seconds": "heartbeat_timeout_seconds: 60",
    "inputs": "inputs: [{ from: { job: follow, output: logs } }]",
    "jitter": "jitter: 0.2",
    "job": "job: follow",
    "jobs": "jobs: [{ name: hello, activation: source, source: { kind: manual }, operator: echo }]",
    "key": "key: /host",
    "kind": "kind: cron",
    "max_attempts": "max_attempts: 3",
    "max_catch_up": "max_catch_up: 100",
    "max_concurrency": "max_concurrency: 4",
    "max_concurrency_per_key": "max_concurrency_per_key: 2",
    "max_queue_age": "max_queue_age: 10m",
    "max_queue_depth": "max_queue_depth: 1000",
    "misfire_grace": "misfire_grace: 1m",
    "name": "name: transfers",
    "non_retryable": "non_retryable: [BadPayload]",
    "on_conflict": "on_conflict: update",
    "operator": "operator: sql, or operator: my_module:my_function",
    "output": "output: logs",
    "outputs": "outputs: [blocks, logs]",
    "partition": "partition: daily, or partition: { every: daily, timezone: Europe/Paris }",
    "priority": "priority: normal",
    "publish": "publish: { transfers: { from: { job: transfers, output: transfers } } }",
    "read_roles": "read_roles: [admin]",
    "runtime": "runtime: platform",
    "scaling": "scaling: { max_concurrency: 4 }",
    "schedule": 'schedule: "0 6 * * *"',
    "source": "source: { kind: manual }",
    "storage": "storage: parquet",
    "timeout_seconds": "timeout_seconds: 3600",
    "timezone": "timezone: Europe/Paris",
    "unique_key": "unique_key: [block_number, log_index]",
    "update_strategy": "update_strategy: replace",
    "wait_for": "wait_for: all",
    "where": "where: \"severity = 'critical'\"",
}
"""Examples for messages about missing or invalid values."""

_OTHER_WORDS: Final = {
    "cron": "schedule",
    "partitions": "partition",
    "partitioned_by": "partition",
    "depends_on": "inputs",
    "lease_seconds": "heartbeat_timeout_seconds",
    "output_index": "output",
    "retries": "max_attempts",
    "timeout": "timeout_seconds",
    "tz": "timezone",
}
"""Field names of other tools, or of the wire format, and the name used here."""


class Rejected(Exception):
    """A value is unusable. The report already has the reason."""


class FieldReader:
    """Reads mappings field by field. Reports and omits invalid fields, and reads the rest."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def read(
        self, node: Node, what: str, known: Mapping[str, FieldInfo], converters: Mapping[str, Converter]
    ) -> dict[str, Any]:
        """Returns the valid values by field name. Any: each value has the type of its field."""
        entries = self.mapping(node, what).entries
        for name in [name for name in entries if name not in known]:
            self._unknown(entries[name].key, name, what, known)
        for name, field in known.items():
            if field.required and name not in entries:
                self._report.add(node.place, f"{what} has no {name}", f"write {EXAMPLES[name]}")
        values = {}
        for name in [name for name in entries if name in known]:
            convert = converters.get(name) or self._by_type(name, known[name])
            try:
                values[name] = self._value(name, entries[name].node, known[name], convert)
            except Rejected:
                continue
        return values

    def mapping(self, node: Node, what: str) -> Fields:
        if not isinstance(node, Fields):
            self._report.add(node.place, f"{what} must be a mapping, not {kind_of(node)}", "write name: value pairs")
            raise Rejected
        return node

    def items(self, node: Node, name: str) -> tuple[Node, ...]:
        if not isinstance(node, Items):
            what = f"{name} must be a list, not {kind_of(node)}"
            self._report.add(node.place, what, f"write {EXAMPLES[name]}")
            raise Rejected
        return node.nodes

    def text(self, name: str, check: Callable[[str], Any]) -> Converter:
        """Returns a converter for text that `check` parses."""

        def convert(node: Node) -> Any:
            if not isinstance(node, Scalar) or not isinstance(node.value, str):
                raise Malformed(f"must be text, not {kind_of(node)}", f"write {EXAMPLES[name]}, in quotes if necessary")
            try:
                return check(node.value)
            except Malformed as wrong:
                raise Malformed(f"{quoted(node.value)} {wrong.what}", wrong.instead) from None

        return convert

    def _unknown(self, place: Place, name: str, what: str, known: Mapping[str, object]) -> None:
        other = _OTHER_WORDS.get(name)
        instead = f"its fields are {listing(known, 40)}"
        instead = f"write {other}" if other in known else self._report.suggest(name, known, instead)
        self._report.add(place, f"{what} has no field {quoted(name)}", instead)

    def _value(self, name: str, node: Node, field: FieldInfo, convert: Converter) -> Any:
        try:
            if isinstance(node, Scalar) and node.value is None:
                return _absent(name, field)
            return convert(node)
        except Malformed as wrong:
            self._report.add(node.place, f"{name} {wrong.what}", wrong.instead)
            raise Rejected from None

    def _by_type(self, name: str, field: FieldInfo) -> Converter:
        if _is_a(field.type, StrEnum):
            return lambda node: self._choice(node, field.type)
        if _is_a(field.type, msgspec.Struct):
            return lambda node: self._struct(name, node, field.type)
        return lambda node: _converted(name, node, field.type)

    def _choice(self, node: Node, choices: type[StrEnum]) -> StrEnum:
        value = plain(node)
        if isinstance(value, str) and value in set(choices):
            return choices(value)
        known = [str(choice) for choice in choices]
        otherwise = f"write {', '.join(known[:-1])} or {known[-1]}"
        instead = self._report.suggest(value, known, otherwise) if isinstance(value, str) else otherwise
        raise Malformed(f"cannot be {kind_of(node)}", instead)

    def _struct(self, name: str, node: Node, struct: type[msgspec.Struct]) -> msgspec.Struct:
        known = {field.name: field for field in msgspec.structs.fields(struct)}
        return struct(**self.read(node, name, known, {}))


def _absent(name: str, field: FieldInfo) -> None:
    if type(None) not in get_args(field.type):
        raise Malformed("has no value", f"write {EXAMPLES[name]}, or remove the field")


def _converted(name: str, node: Node, wanted: Any) -> Any:
    """Converts with msgspec. Any: a type that msgspec understands, such as a bounded number."""
    try:
        return msgspec.convert(plain(node), wanted)
    except msgspec.ValidationError as error:
        sentence = (
            str(error).partition(" - at `$")[0].replace("Expected", "must be").replace(" | null", "").replace("`", "")
        )
        raise Malformed(f"is invalid: {sentence}", f"write {EXAMPLES[name]}") from None


def _is_a(found: Any, wanted: type) -> TypeGuard[type]:
    return isinstance(found, type) and issubclass(found, wanted)


class Malformed(Exception):
    """An invalid value: `what` describes the problem, `instead` the fix."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what = what
        self.instead = instead


_DURATION: Final = re.compile(r"(?=.)(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?")
_UNITS: Final = (86_400, 3_600, 60, 1)
_LONGEST_SECONDS: Final = 366 * 86_400
_LONGEST_COLUMN: Final = 63
_NAME: Final = re.compile(PATH_NAME)
_OPERATOR: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_.]*)?")
_CRON: Final = re.compile(r"[0-9A-Za-z*/,#?-]+(?: +[0-9A-Za-z*/,#?-]+){4}")
_RANDOM: Final = re.compile(r"\b[hr]\b", re.IGNORECASE)
_SCHEDULES: Final = frozenset({"@hourly", "@daily", "@weekly", "@monthly", "@yearly"})


def path_name(text: str) -> str:
    if len(text) > 100:
        raise Malformed(f"is a name of {len(text)} characters", "write at most 100")
    if not _NAME.fullmatch(text):
        raise Malformed(
            "is not a valid name",
            "write letters, digits, - _ and single dots, with a letter or digit first",
        )
    return text


def operator(text: str) -> OperatorName:
    if len(text) > 200 or not _OPERATOR.fullmatch(text):
        raise Malformed("is not an operator name", "write the name of a built-in operator, or module:function")
    return text


def column_name(text: str) -> str:
    """Checks a table's column name. PostgreSQL truncates longer ones; the platform's own start with an underscore."""
    if not 0 < len(text.encode()) <= _LONGEST_COLUMN or not text.isprintable():
        raise Malformed("has an invalid name", f"write 1 to {_LONGEST_COLUMN} bytes of printable characters")
    if text.startswith("_") or text.lower() == "org_id":
        raise Malformed("has a reserved name", "choose a name that does not start with _ and is not org_id")
    return text


def column_type(text: str) -> str:
    """Normalises a column type, with an optional `not null`."""
    words = " ".join(text.lower().replace(", ", ",").split())
    kind = words.removesuffix(" not null")
    if table_type(kind) is None:
        known = ", ".join(TABLE_TYPES)
        raise Malformed("has an unsupported type", f"write one of {known} or decimal(p,s), optionally with not null")
    return words


def duration(text: str) -> DurationSeconds:
    found = _DURATION.fullmatch(text)
    if not found:
        raise Malformed("is not a duration", "write a number with its unit: 90s, 10m, 2h, 1d or 1h30m")
    seconds = sum(int(count or 0) * unit for count, unit in zip(found.groups(), _UNITS, strict=True))
    if not 1 <= seconds <= _LONGEST_SECONDS:
        raise Malformed("is out of range", "write a duration from 1s to 366d")
    return seconds


def schedule(text: str) -> str:
    """Checks a cron schedule of five fields, minutes first. Seconds are not supported: data work is not that fine."""
    if text in _SCHEDULES:
        return text
    if len(text) > 200 or not _CRON.fullmatch(text):
        raise Malformed("is not a cron schedule", "write five fields, such as 0 6 * * 1-5, or @daily")
    if _RANDOM.search(text):
        raise Malformed("is a random schedule", "write the minute and hour themselves instead of H or R")
    if not croniter.is_valid(text):
        raise Malformed("has a field out of range", "write minute 0-59, hour 0-23, day 1-31, month 1-12, weekday 0-7")
    if not croniter.is_valid(text, strict=True):
        raise Malformed("has a day that does not exist in any month", "write a date that exists")
    return re.sub(" +", " ", text)


@functools.cache
def time_zones() -> frozenset[str]:
    return frozenset(zoneinfo.available_timezones())
