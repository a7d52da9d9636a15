"""The time partitions of the jobs of a DAG: declared by sources and range operators, inherited by all other jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from interlock.calendars import Calendar, Every, known
from interlock.dags.definition import Dag, Job, JobOutput
from interlock.dags.lineage import in_order, producer

SPLITTER = "range_splitter"
AGGREGATOR = "range_aggregator"
RANGES = frozenset({SPLITTER, AGGREGATOR})
"""Operators of the dispatcher; see range_operators.py."""

_LENGTHS = list(Every)


@dataclass(frozen=True, slots=True)
class Found:
    """The calendar of a job, and the reason if it cannot have one."""

    calendar: Calendar | None
    known: bool = True
    """False if it depends on a dataset of another DAG that is not known here."""
    wrong: str | None = None
    instead: str = ""


@dataclass(slots=True)
class Partitions:
    """The calendars of the jobs of a DAG. None means that the ranges of a job are integers."""

    dag: Dag
    foreign: Mapping[str, str | None] | None = None
    """Calendars of datasets that other DAGs publish, by name; None: not known."""
    _found: dict[str, Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        jobs = {job.name: job for job in self.dag.jobs}
        for name in in_order(self.dag):
            self._found[name] = self._of(jobs[name])

    def found(self, job: str) -> Found:
        return self._found.get(job, Found(None, known=False))

    def calendar(self, job: str) -> Calendar | None:
        return self.found(job).calendar

    def _of(self, job: Job) -> Found:
        if not job.inputs:
            wanted = job.partition
            return Found(None if wanted is None else Calendar(wanted.every, wanted.timezone or "UTC"))
        read = [self._read(job, index) for index in range(len(job.inputs))]
        certain = all(one.known for one in read)
        calendars = list(dict.fromkeys(one.calendar for one in read if one.calendar is not None))
        if len(calendars) > 1:
            both = " and ".join(map(str, calendars[:2]))
            return Found(calendars[0], certain, f"the inputs of job {job.name!r} are {both}", _AGGREGATE)
        given = calendars[0] if calendars else None
        if job.operator in RANGES:
            return _cut(job, given, certain)
        return _inherited(job, given, certain)

    def _read(self, job: Job, index: int) -> Found:
        edge = job.inputs[index]
        source = producer(self.dag, edge) or edge.from_
        if isinstance(source, JobOutput):
            return self.found(source.job)
        if self.foreign is None or source.dataset not in self.foreign:
            return Found(None, known=False)
        return Found(known(self.foreign[source.dataset]))


_AGGREGATE = "put a range_aggregator with `partition` before the one with the shorter partitions"


def _inherited(job: Job, given: Calendar | None, certain: bool) -> Found:
    wanted = job.partition
    if wanted is None or not certain:
        return Found(given, certain)
    if given is None:
        what = f"job {job.name!r} has a partition, but the ranges of its inputs are integers"
        return Found(None, certain, what, "remove it, or write partition in the job that produces the input")
    if wanted.every != given.every or wanted.timezone not in (None, given.timezone):
        own = " ".join(filter(None, (wanted.every, wanted.timezone)))
        what = f"job {job.name!r} has partition {own}, but its inputs are {given}"
        return Found(given, certain, what, f"remove it, or {_AGGREGATE}")
    return Found(given, certain)


def _cut(job: Job, given: Calendar | None, certain: bool) -> Found:
    """Returns the calendar of a range operator. Its ranges must be made of whole partitions, or cut from them."""
    wanted = job.partition
    if wanted is None:
        return Found(None, certain)
    calendar = Calendar(wanted.every, wanted.timezone or (given.timezone if given else "UTC"))
    if given is None:
        return Found(calendar, certain)
    longer, shorter = (calendar, given) if job.operator == AGGREGATOR else (given, calendar)
    verb = "merge into" if job.operator == AGGREGATOR else "be cut into"
    nested = longer.timezone == shorter.timezone and _LENGTHS.index(longer.every) > _LENGTHS.index(shorter.every)
    if certain and not nested:
        what = f"partitions that are {given} cannot {verb} {calendar}"
        return Found(
            calendar,
            certain,
            what,
            f"write a {'longer' if longer is calendar else 'shorter'} partition in the time zone {given.timezone}",
        )
    return Found(calendar, certain)
