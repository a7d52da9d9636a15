"""One mapping of a file against the fields that it may have: unknown, missing and wrong ones are all reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final, TypeGuard, get_args

import msgspec
from msgspec.structs import FieldInfo

from interlock.dags.nodes import Fields, Items, Node, Scalar, kind_of, plain
from interlock.dags.problems import Place, Report, listing, quoted
from interlock.dags.scalars import Malformed

Converter = Callable[[Node], Any]
"""Any: what comes out is the field's own type. Raises Malformed, or reports and raises Rejected."""

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
"""What to write where a value is missing or wrong."""

_OTHER_WORDS: Final = {
    "cron": "schedule",
    "depends_on": "inputs",
    "lease_seconds": "heartbeat_timeout_seconds",
    "output_index": "output",
    "retries": "max_attempts",
    "timeout": "timeout_seconds",
    "tz": "timezone",
}
"""What people write who know it from elsewhere."""


class Rejected(Exception):
    """A value that cannot be used; the report has said why."""


class FieldReader:
    """Reads mappings field by field. What is wrong is reported and left out; the rest is still read."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def read(
        self, node: Node, what: str, known: Mapping[str, FieldInfo], converters: Mapping[str, Converter]
    ) -> dict[str, Any]:
        """Good values by field name. Any: each has the type that its field says."""
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
        """A converter of texts that have a form of their own."""

        def convert(node: Node) -> Any:
            if not isinstance(node, Scalar) or not isinstance(node.value, str):
                raise Malformed(f"must be text, not {kind_of(node)}", f"write {EXAMPLES[name]}, in quotes if need be")
            try:
                return check(node.value)
            except Malformed as wrong:
                raise Malformed(f"{quoted(node.value)} {wrong.what}", wrong.instead) from None

        return convert

    def _unknown(self, place: Place, name: str, what: str, known: Mapping[str, object]) -> None:
        other = _OTHER_WORDS.get(name)
        instead = f"it has {listing(known, 40)}"
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
    """Any: a type as msgspec understands it, such as a bounded number."""
    try:
        return msgspec.convert(plain(node), wanted)
    except msgspec.ValidationError as error:
        sentence = (
            str(error).partition(" - at `$")[0].replace("Expected", "must be").replace(" | null", "").replace("`", "")
        )
        raise Malformed(f"is wrong: {sentence}", f"write {EXAMPLES[name]}") from None


def _is_a(found: Any, wanted: type) -> TypeGuard[type]:
    return isinstance(found, type) and issubclass(found, wanted)
