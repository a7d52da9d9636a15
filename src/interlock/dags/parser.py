"""Parses a DAG file into a Dag, or into a list of all its problems.

Each of the three steps reports problems and continues: bytes to a tree with positions (yaml_nodes.py), the tree to jobs
(this module, field by field with fields.py), and checks across jobs (checks.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import FieldInfo, replace
from msgspec.structs import fields as fields_of_struct

from interlock.calendars import Every
from interlock.dags import fields as scalars
from interlock.dags import where
from interlock.dags.checks import BUILT_IN, ReadDag, ReadJob, UserCode, check
from interlock.dags.definition import (
    DEFAULTABLE,
    JOB_FIELDS,
    CatchUp,
    Dag,
    Input,
    JobOutput,
    Output,
    Partition,
    Publication,
    Published,
    Source,
    SourceKind,
    fields_of,
    job_of,
)
from interlock.dags.fields import EXAMPLES, Converter, FieldReader, Malformed, Rejected
from interlock.dags.where import sql
from interlock.dags.yaml_nodes import (
    MAX_BYTES,
    START,
    Fields,
    Node,
    Place,
    Problem,
    Report,
    Scalar,
    listing,
    plain,
    quoted,
    tree,
)
from interlock.errors import InvalidDag, InvalidWhere
from interlock.settings import RuntimeKind, Settings
from interlock.wire.access import Role

MAX_COLUMNS: Final = 1_000
"""Limit for a buffered output, slightly below the column limit of PostgreSQL."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names that a DAG may use without defining them."""

    runtimes: frozenset[str]
    operators: frozenset[str] = BUILT_IN
    datasets: frozenset[str] | None = None
    """Dataset names published by other DAGs; None if they are unknown (offline validation)."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Dataset names that this DAG must not publish, and the DAG that publishes them."""
    partitions: Mapping[str, str | None] | None = None
    """Calendars of datasets published by other DAGs; None if they are unknown."""
    spark: frozenset[str] = frozenset({"spark"})
    """Runtimes whose tasks run in a Spark session."""
    code: UserCode = field(default_factory=lambda: UserCode(frozenset({"lambda"})))

    @classmethod
    def of(cls, settings: Settings, *operators: str) -> Vocabulary:
        """Returns the runtimes of these settings, and the built-in operators plus `operators`."""
        runtimes = {name: settings.runtime(name) for name in settings.runtime_names}
        spark = frozenset(name for name, runtime in runtimes.items() if runtime.spark)
        invoked = frozenset(name for name, runtime in runtimes.items() if runtime.kind is RuntimeKind.INVOKE)
        return cls(frozenset(runtimes), BUILT_IN | set(operators), spark=spark, code=UserCode(invoked))


def read(content: bytes, file: str, vocabulary: Vocabulary) -> Dag:
    """Parses a DAG. Raises InvalidDag with all problems."""
    dag, problems = examine(content, file, vocabulary)
    if dag is None:
        raise InvalidDag(problems)
    return dag


def examine(content: bytes, file: str, vocabulary: Vocabulary) -> tuple[Dag | None, list[Problem]]:
    """Returns the DAG and no problems, or None and at least one problem."""
    report = Report(file)
    root = tree(content, report)
    dag = None
    if root is not None:
        try:
            dag = _DagReader(report, vocabulary).dag(root)
        except Rejected:
            dag = None
    return (None, report.problems()) if report or dag is None else (dag, [])


def examine_file(path: Path, vocabulary: Vocabulary) -> tuple[Dag | None, list[Problem]]:
    """Like `examine`, for a file. An unreadable file is a problem too. Reads at most MAX_BYTES + 1 bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        return None, [Problem(str(path), START.line, START.column, what, "check the path and its permissions")]
    return examine(content, str(path), vocabulary)


def _struct_fields(struct: Any) -> Mapping[str, FieldInfo]:
    """Returns the fields by their names in a file. Any: msgspec has no public type for struct classes."""
    return {field.encode_name: field for field in fields_of_struct(struct)}


_DEFAULTS: Final = FieldInfo(name="defaults", encode_name="defaults", type=dict[str, Any], default_factory=dict)
DAG_FIELDS: Final = {**_struct_fields(Dag), "defaults": _DEFAULTS}
"""A file also has `defaults`; in a definition they are merged into the jobs."""


class _DagReader:
    def __init__(self, report: Report, vocabulary: Vocabulary) -> None:
        self._report = report
        self._fields = FieldReader(report)
        self._jobs = _JobReader(report, self._fields, vocabulary)
        self._vocabulary = vocabulary

    def dag(self, root: Node) -> Dag:
        entries = self._fields.mapping(root, "a DAG").entries
        self._jobs.defaults = self._defaults(entries["defaults"].node) if "defaults" in entries else {}
        values = self._fields.read(
            root,
            "the DAG",
            DAG_FIELDS,
            {
                "name": self._fields.text("name", scalars.path_name),
                "defaults": lambda node: self._fields.mapping(node, "defaults"),
                "jobs": self._all_jobs,
                "publish": self._publish,
            },
        )
        jobs: list[ReadJob] = values.get("jobs", [])
        publish: dict[str, tuple[Publication, Place]] = values.get("publish", {})
        publications = {name: publication for name, (publication, _) in publish.items()}
        dag = Dag(name=values.get("name", ""), jobs=tuple(read.job for read in jobs), publish=publications)
        places = {name: place for name, (_, place) in publish.items()}
        known = self._vocabulary
        read = ReadDag(dag, jobs, places, known.partitions)
        check(read, self._report, known.datasets, known.taken, known.spark, known.code)
        return dag

    def _defaults(self, node: Node) -> dict[str, Any]:
        """Reads `defaults` before the jobs, whatever their order. `read` reports a value that is not a mapping."""
        if not isinstance(node, Fields):
            return {}
        known = {name: JOB_FIELDS[name] for name in JOB_FIELDS if name in DEFAULTABLE}
        return self._fields.read(node, "defaults", known, self._jobs.converters)

    def _all_jobs(self, node: Node) -> list[ReadJob]:
        nodes = self._fields.items(node, "jobs")
        if not nodes:
            raise Malformed("is empty", f"write {EXAMPLES['jobs']}")
        return [job for inner in nodes if (job := self._jobs.job(inner)) is not None]

    def _publish(self, node: Node) -> dict[str, tuple[Publication, Place]]:
        found: dict[str, tuple[Publication, Place]] = {}
        for name, entry in self._fields.mapping(node, "publish").entries.items():
            try:
                found[name] = (self._publication(name, entry.node), entry.node.place)
                scalars.path_name(name)
            except Malformed as wrong:
                self._report.add(entry.key, f"{name!r} {wrong.what}", wrong.instead)
            except Rejected:
                continue
        return found

    def _publication(self, name: str, node: Node) -> Publication:
        converters = {"from": self._jobs.job_output, "read_roles": self._read_roles}
        values = self._fields.read(node, f"published {name[:100]!r}", _struct_fields(Publication), converters)
        if "from" not in values:
            raise Rejected
        return Publication(**{"from_" if field == "from" else field: value for field, value in values.items()})

    def _read_roles(self, node: Node) -> tuple[Role, ...]:
        named = plain(node)
        known = [str(role) for role in Role]
        if not isinstance(named, list) or not named or not all(role in known for role in named):
            raise Malformed(f"must be a list of {listing(known)}", f"write {EXAMPLES['read_roles']}")
        return tuple(role for role in Role if role in named)


class _JobReader:
    """Reads jobs one by one, on top of the DAG's defaults."""

    def __init__(self, report: Report, fields: FieldReader, vocabulary: Vocabulary) -> None:
        self._report = report
        self._fields = fields
        self._vocabulary = vocabulary
        self.defaults: dict[str, Any] = {}
        self.converters: dict[str, Converter] = {
            "name": fields.text("name", scalars.path_name),
            "operator": fields.text("operator", self._operator),
            "runtime": fields.text("runtime", self._runtime),
            "partition": self._partition,
            "source": self._source,
            "inputs": self._inputs,
            "outputs": self._outputs,
            "config": lambda node: plain(fields.mapping(node, "config")),
            "unique_key": self._unique_key,
            "max_queue_age": fields.text("max_queue_age", scalars.duration),
        }

    def job(self, node: Node) -> ReadJob | None:
        try:
            values = self._fields.read(node, _titled(node), JOB_FIELDS, self.converters)
        except Rejected:
            return None
        entries = node.entries if isinstance(node, Fields) else {}
        places = {name: entry.node.place for name, entry in entries.items()}
        unread = frozenset(entries.keys() - values.keys())
        name = _text_of(entries["name"].node) if "name" in entries else None
        if name is None:
            return None
        placed: list[tuple[Input, Place]] = values.pop("inputs", [])
        merged = self.defaults | {"operator": ""} | values | {"name": name}
        if "source" in values:
            merged |= _of_interval(merged, entries["source"].node)
        job = job_of(merged | {"inputs": tuple(edge for edge, _ in placed)})
        return ReadJob(job, node.place, places, [place for _, place in placed], unread)

    def _operator(self, text: str) -> str:
        name = scalars.operator(text)
        if ":" not in name and name not in self._vocabulary.operators:
            otherwise = f"write one of {listing(self._vocabulary.operators, 20)}, or your own module:function"
            raise Malformed(
                "is not a known operator", self._report.suggest(name, self._vocabulary.operators, otherwise)
            )
        return name

    def _runtime(self, text: str) -> str:
        known = self._vocabulary.runtimes
        if text not in known:
            instead = self._report.suggest(text, known, f"write one of {listing(known)}")
            raise Malformed("is not a known runtime", instead)
        return text

    def _unique_key(self, node: Node) -> tuple[str, ...]:
        value = plain(node)
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) and 0 < len(name) <= 255 for name in names):
            raise Malformed("must be a list of column names", f"write {EXAMPLES['unique_key']}")
        if len(set(names)) < len(names):
            raise Malformed("has a duplicate column", "name each column once")
        if len(names) > 32:
            raise Malformed(f"has {len(names)} columns", "write at most 32")
        return tuple(names)

    def _columns(self, node: Node) -> dict[str, str]:
        entries = self._fields.mapping(node, "columns").entries
        if len(entries) > MAX_COLUMNS:
            raise Malformed(f"has {len(entries)} columns", f"write at most {MAX_COLUMNS}")
        found: dict[str, str] = {}
        for name, entry in entries.items():
            if name.lower() in {other.lower() for other in found}:
                what = f"duplicate column {quoted(name)}: column names are case-insensitive"
                self._report.add(entry.key, what, "choose another name")
            try:
                found[scalars.column_name(name)] = scalars.column_type(_text_of(entry.node) or "")
            except Malformed as wrong:
                self._report.add(entry.key, f"column {quoted(name)} {wrong.what}", wrong.instead)
        return found

    def _partition(self, node: Node) -> Partition:
        value = plain(node)
        if isinstance(value, str):
            if value not in set(Every):
                known = [str(one) for one in Every]
                raise Malformed(
                    f"cannot be {value[:60]}", self._report.suggest(value, known, f"write {listing(known)}")
                )
            return Partition(every=Every(value))
        converters = {"timezone": self._fields.text("timezone", self._timezone)}
        values = self._fields.read(node, "partition", _struct_fields(Partition), converters)
        if "every" not in values:
            raise Rejected
        return Partition(**values)

    # Sources

    def _source(self, node: Node) -> Source:
        converters = {
            "schedule": self._fields.text("schedule", scalars.schedule),
            "timezone": self._fields.text("timezone", self._timezone),
            "misfire_grace": self._fields.text("misfire_grace", scalars.duration),
        }
        values = self._fields.read(node, "source", _struct_fields(Source), converters)
        if "kind" not in values:
            raise Rejected
        source = Source(**values)
        self._check_kind(source, node)
        return source

    def _check_kind(self, source: Source, node: Node) -> None:
        """Rejects fields that the source's kind does not use, such as a schedule that would be ignored."""
        entries = self._fields.mapping(node, "source").entries
        for name, entry in entries.items():
            if name in _struct_fields(Source) and name != "kind" and name not in fields_of(source.kind):
                self._report.add(entry.key, f"a source of kind {source.kind} cannot have {name}", "remove it")
        if source.kind is SourceKind.CRON and "schedule" not in entries:
            self._report.add(node.place, "a source of kind cron needs a schedule", f"write {EXAMPLES['schedule']}")

    def _timezone(self, text: str) -> str:
        known = scalars.time_zones()
        if text not in known:
            otherwise = "write a name from the IANA time zone database, such as Europe/Paris or UTC"
            raise Malformed("is not a known time zone", self._report.suggest(text, known, otherwise))
        return text

    # Edges

    def _inputs(self, node: Node) -> list[tuple[Input, Place]]:
        found = []
        for inner in self._fields.items(node, "inputs"):
            try:
                found.append(self._input(inner))
            except Rejected:
                continue
        return found

    def _input(self, node: Node) -> tuple[Input, Place]:
        converters = {"from": self._edge, "where": self._fields.text("where", _condition)}
        values = self._fields.read(node, "an input", _struct_fields(Input), converters)
        if "from" not in values:
            raise Rejected
        place = self._fields.mapping(node, "an input").entries["from"].node.place
        return Input(from_=values["from"], where=values.get("where")), place

    def _edge(self, node: Node) -> JobOutput | Published:
        entries = self._fields.mapping(node, "from").entries
        if "dataset" not in entries:
            return self.job_output(node)
        if "job" in entries or "output" in entries:
            raise Malformed("has both a job and a dataset", "write { job, output } or { dataset }")
        converters = {"dataset": self._fields.text("dataset", scalars.path_name)}
        values = self._fields.read(node, "from", _struct_fields(Published), converters)
        if "dataset" not in values:
            raise Rejected
        return Published(dataset=values["dataset"])

    def job_output(self, node: Node) -> JobOutput:
        converters = {name: self._fields.text(name, str) for name in ("job", "output")}
        values = self._fields.read(node, "from", _struct_fields(JobOutput), converters)
        if len(values) < 2:
            raise Rejected
        return JobOutput(**values)

    def _outputs(self, node: Node) -> tuple[Output, ...]:
        found: dict[str, Output] = {}
        for inner in self._fields.items(node, "outputs"):
            try:
                output = self._output(inner)
            except Malformed as wrong:
                self._report.add(inner.place, f"output {wrong.what}", wrong.instead)
                continue
            except Rejected:
                continue
            if found.setdefault(output.name, output) is not output:
                self._report.add(inner.place, f"duplicate output name {output.name!r}", "choose another name")
        return tuple(found.values())

    def _output(self, node: Node) -> Output:
        name = self._fields.text("name", scalars.path_name)
        if isinstance(node, Scalar):
            return Output(name=name(node))
        converters = {"name": name, "unique_key": self._unique_key, "columns": self._columns}
        values = self._fields.read(node, "an output", _struct_fields(Output), converters)
        if "name" not in values:
            raise Rejected
        return Output(**values)


def _of_interval(values: Mapping[str, Any], node: Node) -> dict[str, Any]:
    """Fills in what follows from the partition of a source: its time zone, and that no interval is left out."""
    source, partition = values["source"], values.get("partition")
    if partition is None:
        return {}
    if source.kind is SourceKind.CRON and isinstance(node, Fields) and "catch_up" not in node.entries:
        source = replace(source, catch_up=CatchUp.ALL)
    timezone = partition.timezone or (source.timezone if source.kind is SourceKind.CRON else "UTC")
    return {"source": source, "partition": replace(partition, timezone=timezone)}


def _condition(text: str) -> str:
    try:
        return sql(where.parse(text))
    except InvalidWhere as error:
        what, _, instead = error.detail.partition(": ")
        raise Malformed(
            f"is invalid at character {error.position}: {what}", instead or f"write {where.ALLOWED}"
        ) from None


def _titled(node: Node) -> str:
    """Names a job for messages, as far as the job has a name."""
    entries = node.entries if isinstance(node, Fields) else {}
    name = _text_of(entries["name"].node) if "name" in entries else None
    return f"job {name[:100]!r}" if name else "a job"


def _text_of(node: Node) -> str | None:
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None
