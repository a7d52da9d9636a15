"""Checks that need a whole job or several jobs: edges, cycles, and fields that depend on each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from interlock.dags.definition import Activation, Dag, Job, JobOutput, OnConflict, Published, Storage, UpdateStrategy
from interlock.dags.fields import EXAMPLES
from interlock.dags.lineage import cycles, producer
from interlock.dags.partitioning import AGGREGATOR, RANGES, SPLITTER, Partitions
from interlock.dags.yaml_nodes import Place, Report, listing, quoted
from interlock.jobs.definitions import inline_problem
from interlock.tasks import operators
from interlock.untrusted.bundles import UDF, Bundle, bundle_problem, config_problem, pinned

BUILT_IN: Final = operators.BUILT_IN - {operators.SPARK_MAP}
"""Built-in names, valid in every runtime. Excludes `spark_map`, which is for bulk runs only."""

ON_SPARK: Final = frozenset(
    {"block_ingest", "dedupe", "erc20_transfers", "integrity_check", "parquet_compact", "rollup", "sql"}
)
"""Operators that read and write DataFrames."""
NOT_ON_SPARK: Final = frozenset({"block_follower", "echo", "fail", "http_fetch", "python", "sleep"})

_LARGEST: Final = 2**62
PARTITION: Final = "partition"
"""Setting of the range operators that a deploy adds: the calendar of the job."""


def range_problem(operator: str, config: Mapping[str, Any]) -> str | None:
    """Returns the problem of a range operator's config as a clause, or None."""
    known = {"size", "start"} if operator == AGGREGATOR else {"size"}
    if PARTITION in config:
        return _calendar_problem(operator, config)
    unknown = sorted(map(str, config.keys() - known))
    if unknown:
        return f"{operator} has no setting {unknown[0][:60]!r}"
    if not _whole(config.get("size"), least=1):
        return f"{operator} needs a size, an integer of at least 1, or a partition of its job"
    if not _whole(config.get("start", 0), least=0):
        return f"start of {operator} must be an integer of at least 0"
    return None


def _calendar_problem(operator: str, config: Mapping[str, Any]) -> str | None:
    """Returns the problem of a config with the calendar of the job, which a deploy adds."""
    if "size" in config:
        return f"{operator} has a size, but its job has a partition"
    unknown = sorted(map(str, config.keys() - {PARTITION}))
    return f"{operator} of a job with a partition has no setting {unknown[0][:60]!r}" if unknown else None


def _whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


_MAX_CYCLE_SHOWN: Final = 100
_RANGE_CONFIGS: Final = {
    SPLITTER: "write config: { size: 1000 }, or partition: hourly",
    AGGREGATOR: "write config: { size: 1000, start: 0 }, of which start may be left out, or partition: daily",
}


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A job and the positions of its parts in the file."""

    job: Job
    place: Place
    places: dict[str, Place]
    """Positions of the values, by field name."""
    edges: list[Place]
    """Positions of each input's `from`, in the order of the inputs."""
    unread: frozenset[str]
    """Fields that are present but invalid. Their problem is reported already, so later checks skip them."""

    def at(self, field: str) -> Place:
        return self.places.get(field, self.place)


@dataclass(frozen=True, slots=True)
class UserCode:
    """The runtimes and bundles that an installation offers for user code."""

    runtimes: frozenset[str]
    """Runtimes that run user code and nothing else."""
    bundles: Mapping[str, Bundle] | None = None
    """Bundles by the names that jobs use; None if the bundles are unknown (offline validation)."""


@dataclass(frozen=True, slots=True)
class ReadDag:
    dag: Dag
    jobs: list[ReadJob]
    publish: dict[str, Place]
    partitions: Mapping[str, str | None] | None = None
    """Calendars of datasets of other DAGs, if they are known."""


def check(
    read: ReadDag,
    report: Report,
    datasets: frozenset[str] | None,
    taken: Mapping[str, str],
    spark: frozenset[str],
    code: UserCode,
) -> None:
    by_name = _by_name(read, report)
    for found in read.jobs:
        _check_activation(found, report)
        _check_keys(found, report)
        _check_columns(found, report, spark)
        _check_ranges(found, report)
        _check_runtime(found, report, spark)
        _check_udf(found, report, code)
        _check_edges(read, found, by_name, report, datasets)
    for name, publication in read.dag.publish.items():
        _check_output(publication.from_, read.publish[name], by_name, report)
        if name in taken:
            what = f"dataset name {quoted(name)} is already published by DAG {quoted(taken[name])}"
            report.add(read.publish[name], what, "publish it under another name")
    _check_cycles(read, by_name, report)
    _check_partitions(read, report)


def _check_partitions(read: ReadDag, report: Report) -> None:
    partitions = Partitions(read.dag, read.partitions)
    for found in read.jobs:
        of_job = partitions.found(found.job.name)
        if of_job.wrong is not None and not found.unread & {"partition", "inputs", "operator"}:
            field = "inputs" if found.job.partition is None else "partition"
            report.add(found.at(field), of_job.wrong, of_job.instead)


def _by_name(read: ReadDag, report: Report) -> dict[str, ReadJob]:
    by_name: dict[str, ReadJob] = {}
    for found in read.jobs:
        first = by_name.setdefault(found.job.name, found)
        if first is not found:
            what = f"job name {quoted(found.job.name)} is already used on line {first.place.line}"
            report.add(found.at("name"), what, "choose another name")
    return by_name


def _check_activation(found: ReadJob, report: Report) -> None:
    job = found.job
    named = f"job {quoted(job.name)}"
    if found.unread & {"activation", "source", "inputs"}:
        return
    if job.activation is Activation.SOURCE:
        if job.source is None:
            report.add(found.place, f"{named} has activation: source but no source", f"write {EXAMPLES['source']}")
        if job.inputs:
            what = f"{named} has activation: source, so it cannot have inputs"
            report.add(found.at("inputs"), what, "remove inputs, or activation: source")
        return
    if job.source is not None:
        what = f"{named} has a source, but its activation is reactive"
        report.add(found.at("source"), what, "add activation: source")
    elif not job.inputs:
        what = f"{named} has no inputs, so nothing would start it"
        report.add(found.place, what, f"write {EXAMPLES['inputs']}, or activation: source")


def _check_keys(found: ReadJob, report: Report) -> None:
    """Requires a unique key for appended and buffered rows. Without one, a retry would add the same rows twice."""
    job = found.job
    if found.unread & {"outputs", "unique_key", "update_strategy"}:
        return
    append = job.update_strategy is UpdateStrategy.APPEND
    keyed = [output for output in job.outputs if append or output.storage is Storage.BUFFERED]
    lacking = [output.name for output in keyed if not (output.unique_key or job.unique_key)]
    if append and not job.outputs and not job.unique_key:
        lacking = [job.name]
    if lacking:
        reason = "update_strategy: append" if append else "storage: buffered"
        place = found.at("update_strategy" if append else "outputs")
        what = f"{reason} of {quoted(lacking[0])} requires a unique_key"
        report.add(place, what, f"write the columns that identify a row: {EXAMPLES['unique_key']}")
    if job.unique_key and not keyed and not append:
        what = "unique_key has no effect with update_strategy: replace"
        report.add(found.at("unique_key"), what, "remove it, or write update_strategy: append")


def _check_columns(found: ReadJob, report: Report, spark: frozenset[str]) -> None:
    """Checks the declared columns of buffered outputs. The sink accepts only declared columns."""
    job = found.job
    if found.unread & {"outputs", "unique_key"}:
        return
    for output in job.outputs:
        named = f"output {quoted(output.name)}"
        if output.storage is not Storage.BUFFERED:
            if output.columns or output.on_conflict is not OnConflict.NOTHING:
                what = f"columns and on_conflict of {named} have no effect with storage: {output.storage}"
                report.add(found.at("outputs"), what, "remove them, or write storage: buffered")
        elif not output.columns:
            what = f"{named} has storage: buffered but no columns"
            report.add(found.at("outputs"), what, f"write {EXAMPLES['columns']}")
        elif job.runtime in spark or job.operator in RANGES:
            what = f"{named} has storage: buffered, but operator {job.operator} does not write batches"
            report.add(found.at("outputs"), what, "write storage: parquet")
        else:
            for name in output.unique_key or job.unique_key:
                _check_key(name, output.columns, named, found.at("outputs"), report)


def _check_key(name: str, columns: Mapping[str, str], named: str, place: Place, report: Report) -> None:
    kind = columns.get(name, "").removesuffix(" not null")
    if not kind:
        what = f"unique_key of {named} names {quoted(name)}, which is not one of its columns"
        report.add(place, what, f"write one of {listing(columns)}")
    elif kind in ("float", "double"):
        what = f"unique_key of {named} uses column {quoted(name)} of type {kind}, whose equality is not reliable"
        report.add(place, what, "make the column a decimal, or use another column")


def _check_ranges(found: ReadJob, report: Report) -> None:
    """Checks the range operators: they run in the dispatcher, read one input and report ranges through one output."""
    job = found.job
    if job.operator not in RANGES:
        return
    named = f"operator {job.operator} of job {quoted(job.name)}"
    config = job.config if job.partition is None else job.config | {PARTITION: job.partition.every}
    wrong = None if "config" in found.unread else range_problem(job.operator, config)
    if wrong:
        report.add(found.at("config"), wrong, _RANGE_CONFIGS[job.operator])
    if job.runtime != "dispatcher" and "runtime" not in found.unread:
        report.add(found.at("runtime"), f"{named} runs only in the dispatcher", "write runtime: dispatcher")
    if len(job.outputs) != 1 and "outputs" not in found.unread:
        report.add(found.at("outputs"), f"{named} must have exactly one output", "write outputs: [ranges]")
    if len(job.inputs) > 1 and "inputs" not in found.unread:
        report.add(found.at("inputs"), f"{named} must have exactly one input", "use a separate job for each input")


def _check_runtime(found: ReadJob, report: Report, spark: frozenset[str]) -> None:
    """Rejects a built-in operator in a runtime that cannot run it: some need Spark, others do not run on it."""
    job = found.job
    if found.unread & {"runtime", "operator"}:
        return
    named = f"operator {job.operator} of job {quoted(job.name)}"
    if job.operator in ON_SPARK and job.runtime not in spark:
        report.add(found.at("runtime"), f"{named} runs only on Spark", "write runtime: spark")
    elif job.operator in NOT_ON_SPARK and job.runtime in spark:
        report.add(found.at("runtime"), f"{named} does not run on Spark", "write runtime: platform")
    elif job.runtime == "dispatcher" and (wrong := inline_problem(job.operator)):
        report.add(found.at("runtime"), f"{wrong} (job {quoted(job.name)})", "write runtime: platform")


def _check_udf(found: ReadJob, report: Report, code: UserCode) -> None:
    """Requires user code to run in a runtime for untrusted code, and reserves such runtimes for user code."""
    job = found.job
    if found.unread & {"runtime", "operator", "config"}:
        return
    if job.operator != UDF:
        if job.runtime in code.runtimes:
            what = f"runtime {job.runtime} of job {quoted(job.name)} runs only bundles (operator: udf)"
            report.add(found.at("runtime"), what, "write operator: udf, or another runtime")
        return
    if job.runtime not in code.runtimes:
        what = f"operator udf of job {quoted(job.name)} needs a runtime for untrusted code"
        report.add(found.at("runtime"), what, f"write runtime: {min(code.runtimes, default='lambda')}")
    if wrong := config_problem(job.config):
        report.add(found.at("config"), wrong, "write config: { bundle: alerts, entrypoint: alerts.handler }")
    elif code.bundles is not None and (wrong := bundle_problem(job.config, code.bundles)):
        report.add(found.at("config"), wrong, "upload it with `interlock bundle upload`, or name another bundle")


def _check_edges(
    read: ReadDag, found: ReadJob, by_name: dict[str, ReadJob], report: Report, datasets: frozenset[str] | None
) -> None:
    for edge, place in zip(found.job.inputs, found.edges, strict=True):
        if isinstance(edge.from_, JobOutput):
            _check_output(edge.from_, place, by_name, report)
        else:
            _check_dataset(edge.from_, place, read, report, datasets)
        if (source := producer(read.dag, edge)) and source.job == found.job.name:
            what = f"job {quoted(found.job.name)} reads its own output"
            report.add(place, what, "read from another job")


def _check_output(edge: JobOutput, place: Place, by_name: dict[str, ReadJob], report: Report) -> None:
    found = by_name.get(edge.job)
    if found is None:
        otherwise = f"the jobs are {listing(by_name)}"
        report.add(place, f"unknown job {quoted(edge.job)}", report.suggest(edge.job, by_name, otherwise))
    elif found.job.output(edge.output) is None and "outputs" not in found.unread:
        names = [output.name for output in found.job.outputs]
        otherwise = f"its outputs are {listing(names)}" if names else f"add outputs: [{edge.output[:60]}] to the job"
        what = f"job {quoted(edge.job)} has no output {quoted(edge.output)}"
        report.add(place, what, report.suggest(edge.output, names, otherwise))


def _check_dataset(
    edge: Published, place: Place, read: ReadDag, report: Report, datasets: frozenset[str] | None
) -> None:
    if datasets is None or edge.dataset in datasets or edge.dataset in read.dag.publish:
        return
    known = datasets | read.dag.publish.keys()
    others = f"; published datasets: {listing(datasets)}" if datasets else ""
    otherwise = f"deploy the DAG that publishes it first{others}"
    report.add(place, f"no DAG publishes {quoted(edge.dataset)}", report.suggest(edge.dataset, known, otherwise))


def _check_cycles(read: ReadDag, by_name: dict[str, ReadJob], report: Report) -> None:
    followers: dict[str, set[str]] = {name: set() for name in by_name}
    for found in by_name.values():
        for name in _upstream(read, found):
            # _check_edges has already reported a job that reads its own output.
            if name in followers and name != found.job.name:
                followers[name].add(found.job.name)
    for cycle in cycles({name: sorted(targets) for name, targets in followers.items()}):
        first = by_name[cycle[0]]
        edges = zip(_upstream(read, first), first.edges, strict=True)
        place = next(place for name, place in edges if name == cycle[-1])
        report.add(place, f"the jobs form a cycle: {_cycle_text(cycle)}", "remove one of these inputs")


def _upstream(read: ReadDag, found: ReadJob) -> Iterator[str | None]:
    """Yields the upstream job of each input, in the order of the inputs, so that an edge maps to its position."""
    for edge in found.job.inputs:
        source = producer(read.dag, edge)
        yield source.job if source else None


def _cycle_text(cycle: list[str]) -> str:
    names = [*cycle, cycle[0]]
    if len(names) > _MAX_CYCLE_SHOWN:
        half = _MAX_CYCLE_SHOWN // 2
        names = [*names[:half], f"… {len(names) - 2 * half} more …", *names[-half:]]
    return " → ".join(name[:60] for name in names)


def udf_configs(dag: Dag) -> list[dict[str, Any]]:
    return [job.config for job in dag.jobs if job.operator == UDF]


def pinned_to(dag: Dag, bundles: Mapping[str, Bundle]) -> Dag:
    """Replaces bundle names with digests, so that a name that points to a new bundle gives a new DAG version."""
    jobs = (replace(job, config=pinned(job.config, bundles)) if job.operator == UDF else job for job in dag.jobs)
    return replace(dag, jobs=tuple(jobs))
