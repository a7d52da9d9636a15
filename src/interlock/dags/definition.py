"""Definition of a DAG: its jobs, edges and published datasets. Typed, frozen, with every default filled in.

The canonical form names every field, sorts what has no order, and spells each value in one way. Its SHA-256 is the
identity of a DAG version: two files with the same hash mean the same. Comments, layout, the order of jobs, and whether
a value came from `defaults` do not change it.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, field

from interlock.calendars import Every
from interlock.wire.access import Role
from interlock.wire.base import OperatorName, Priority
from interlock.wire.jobs import Policy, Scaling

PATH_NAME: Final = r"^[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]*$(?!\n)"
PathName = Annotated[str, Meta(min_length=1, max_length=100, pattern=PATH_NAME)]
"""Safe unchanged in a URL, a file name and an object key. No colon: Hadoop reads it as a URL scheme."""
ColumnName = Annotated[str, Meta(min_length=1, max_length=255)]
UniqueKey = Annotated[tuple[ColumnName, ...], Meta(max_length=32)]
DurationSeconds = Annotated[int, Meta(ge=1, le=366 * 86_400)]
"""Written with a unit, such as 10m; stored in whole seconds."""


class Activation(StrEnum):
    SOURCE = "source"
    """Starts without an input: runs all the time, on a schedule, or on a webhook, command or manual event."""
    REACTIVE = "reactive"
    """Runs when one of its inputs changes."""


class SourceKind(StrEnum):
    ALWAYS_ON = "always_on"
    CRON = "cron"
    WEBHOOK = "webhook"
    MANUAL = "manual"
    COMMAND = "command"


class CatchUp(StrEnum):
    """Handling of scheduled times that passed while no scheduler was running."""

    NONE = "none"
    LATEST = "latest"
    ALL = "all"


class WebhookAuth(StrEnum):
    HMAC = "hmac"
    TOKEN = "token"  # noqa: S105 - the name of an authentication method, not a secret


class WaitFor(StrEnum):
    ALL = "all"
    ANY = "any"


class ExecutionStrategy(StrEnum):
    PER_PARTITION = "PerPartition"
    PER_UPDATE = "PerUpdate"


class UpdateStrategy(StrEnum):
    REPLACE = "replace"
    APPEND = "append"


class Storage(StrEnum):
    PARQUET = "parquet"
    POSTGRES = "postgres"
    BUFFERED = "buffered"


class OnConflict(StrEnum):
    """Handling of a row whose unique_key already exists in a buffered output."""

    NOTHING = "nothing"
    UPDATE = "update"


class _Part(Struct, frozen=True, kw_only=True):
    """Base of all parts of a definition."""


class Partition(_Part, frozen=True, kw_only=True):
    """The length of the partitions that a job writes."""

    every: Every
    timezone: str | None = None
    """None: that of the inputs, or UTC."""


class Source(_Part, frozen=True, kw_only=True):
    """The trigger of a source job."""

    kind: SourceKind
    schedule: Annotated[str, Meta(max_length=200)] | None = None
    timezone: str = "UTC"
    catch_up: CatchUp = CatchUp.LATEST
    max_catch_up: Annotated[int, Meta(ge=1, le=10_000)] = 100
    misfire_grace: DurationSeconds = 60
    auth: WebhookAuth = WebhookAuth.HMAC


OF_CRON: Final = frozenset({"schedule", "timezone", "catch_up", "max_catch_up", "misfire_grace"})
OF_WEBHOOK: Final = frozenset({"auth"})


class JobOutput(_Part, frozen=True, kw_only=True):
    """An edge within the DAG."""

    job: PathName
    output: PathName


class Published(_Part, frozen=True, kw_only=True):
    """An edge to a dataset by its published name, in this DAG or another one."""

    dataset: PathName


class Input(_Part, frozen=True, kw_only=True):
    from_: JobOutput | Published = field(name="from")
    where: str | None = None
    """Canonical text; see where.py."""


class Output(_Part, frozen=True, kw_only=True):
    name: PathName
    storage: Storage = Storage.PARQUET
    unique_key: UniqueKey = ()
    """Columns that identify a row; empty means the job's unique_key."""
    columns: dict[ColumnName, str] = field(default_factory=dict)
    """Columns of a buffered output, which accepts no others. Types as in Spark, optionally with suffix `not null`."""
    on_conflict: OnConflict = OnConflict.NOTHING


OF_BUFFERED: Final = ("columns", "on_conflict")


class Job(_Part, frozen=True, kw_only=True):
    name: PathName
    operator: OperatorName
    runtime: PathName = "platform"
    activation: Activation = Activation.REACTIVE
    source: Source | None = None
    inputs: tuple[Input, ...] = ()
    wait_for: WaitFor = WaitFor.ALL
    outputs: tuple[Output, ...] = ()
    """In the order of `output_index`."""
    config: dict[str, Any] = field(default_factory=dict)
    partition: Partition | None = None
    """Time partitions. None: those of the inputs, or ranges of integers."""
    execution_strategy: ExecutionStrategy = ExecutionStrategy.PER_PARTITION
    update_strategy: UpdateStrategy = UpdateStrategy.REPLACE
    unique_key: UniqueKey = ()
    max_queue_depth: Annotated[int, Meta(ge=1, le=100_000_000)] | None = None
    max_queue_age: DurationSeconds | None = None
    priority: Priority = Priority.NORMAL
    scaling: Scaling = field(default_factory=Scaling)
    policy: Policy = field(default_factory=Policy)
    """A file writes these fields directly in the job, without a `policy` heading."""

    def output(self, name: str) -> Output | None:
        return next((output for output in self.outputs if output.name == name), None)


class Publication(_Part, frozen=True, kw_only=True):
    from_: JobOutput = field(name="from")
    read_roles: tuple[Role, ...] = tuple(Role)
    """Roles whose API keys may read the dataset, in the order of `Role`."""


class Dag(_Part, frozen=True, kw_only=True):
    name: PathName
    jobs: tuple[Job, ...]
    """In the order of the file."""
    publish: dict[PathName, Publication] = field(default_factory=dict)

    def job(self, name: str) -> Job | None:
        return next((job for job in self.jobs if job.name == name), None)


# Fields of a job as a file writes them

_WRITTEN: Final = {"lease_seconds": "heartbeat_timeout_seconds"}
"""DAG files name the lease by what users observe: it expires when heartbeats stop."""
POLICY_FIELDS: Final = {_WRITTEN.get(each.name, each.name): each for each in msgspec.structs.fields(Policy)}
JOB_FIELDS: Final = {each.name: each for each in msgspec.structs.fields(Job) if each.name != "policy"} | POLICY_FIELDS
DEFAULTABLE: Final = frozenset(
    {
        "runtime",
        "partition",
        "execution_strategy",
        "max_queue_depth",
        "max_queue_age",
        "priority",
        "scaling",
        *POLICY_FIELDS,
    }
)
"""Fields that `defaults` may set for all jobs."""


def job_of(values: dict[str, Any]) -> Job:
    """Builds a job from values under the field names of a file."""
    policy = {each.name: values[name] for name, each in POLICY_FIELDS.items() if name in values}
    own = {name: value for name, value in values.items() if name not in POLICY_FIELDS}
    return Job(**own, policy=Policy(**policy))


# Canonical form


def document(dag: Dag) -> dict[str, Any]:
    """Returns the canonical form in the structure of a DAG file: reading it back gives the same definition."""
    jobs = sorted((_job_document(job) for job in dag.jobs), key=lambda job: str(job["name"]))
    return {"name": dag.name, "jobs": jobs, "publish": msgspec.to_builtins(dag.publish)}


def _job_document(job: Job) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.to_builtins(job)
    policy = written.pop("policy")
    written |= {name: policy[each.name] for name, each in POLICY_FIELDS.items()}
    written["max_queue_age"] = job.max_queue_age and f"{job.max_queue_age}s"
    for output in written["outputs"]:
        if output["storage"] != Storage.BUFFERED:
            # Omitted where they have no effect, so that hashes from before these fields existed stay valid.
            for name in OF_BUFFERED:
                del output[name]
    if job.partition is None:
        # Omitted, so that hashes from before this field existed stay valid.
        del written["partition"]
    if job.source is None:
        del written["source"]
    else:
        written["source"] = source_document(job.source)
    return written


def source_document(source: Source) -> dict[str, Any]:
    """Omits the fields that do not belong to the source's kind: they have no effect on the job."""
    written: dict[str, Any] = msgspec.to_builtins(source)
    written["misfire_grace"] = f"{source.misfire_grace}s"
    foreign = set(written) - {"kind"} - fields_of(source.kind)
    return {name: value for name, value in written.items() if name not in foreign}


def fields_of(kind: SourceKind) -> frozenset[str]:
    """Returns the fields that a source of this kind may have besides `kind`."""
    return {SourceKind.CRON: OF_CRON, SourceKind.WEBHOOK: OF_WEBHOOK}.get(kind, frozenset())


def canonical(dag: Dag) -> bytes:
    return msgspec.json.encode(document(dag), order="sorted")


def content_hash(dag: Dag) -> str:
    return hashlib.sha256(canonical(dag)).hexdigest()


def job_hash(job: Job) -> str:
    """Hashes the job's own definition, without anything upstream of it."""
    return hashlib.sha256(msgspec.json.encode(_job_document(job), order="sorted")).hexdigest()


TUNING: Final = frozenset({"max_queue_depth", "max_queue_age", "priority", "scaling", *POLICY_FIELDS})
"""Fields that affect how tasks run but not what they produce. They change in place; nothing is rebuilt."""


def build_hash(job: Job) -> str:
    """Hashes what determines the job's outputs: its definition without tuning fields and, for a source, its kind."""
    written = {name: value for name, value in _job_document(job).items() if name not in TUNING}
    if job.source is not None:
        written["source"] = job.source.kind
    return hashlib.sha256(msgspec.json.encode(written, order="sorted")).hexdigest()


# Parsing the canonical form


def dag_of(content: bytes | str) -> Dag:
    """Decodes a canonical document. Does not validate: the document was validated when it was written."""
    written = msgspec.json.decode(content)
    return Dag(
        name=written["name"],
        jobs=tuple(_job_of(job) for job in written["jobs"]),
        publish=msgspec.convert(written["publish"], dict[str, Publication]),
    )


_PLAIN: Final = {each.name: each.type for each in msgspec.structs.fields(Job) if each.name not in ("inputs", "policy")}


def _job_of(written: dict[str, Any]) -> Job:
    values = {name: written[name] for name in _PLAIN if name in written}
    values["max_queue_age"] = _seconds(written["max_queue_age"])
    if source := written.get("source"):
        grace = {"misfire_grace": _seconds(source["misfire_grace"])} if "misfire_grace" in source else {}
        values["source"] = source | grace
    policy = {each.name: written[name] for name, each in POLICY_FIELDS.items()}
    return Job(
        **{name: msgspec.convert(value, _PLAIN[name]) for name, value in values.items()},
        inputs=tuple(_input_of(edge) for edge in written["inputs"]),
        policy=msgspec.convert(policy, Policy),
    )


def _input_of(written: dict[str, Any]) -> Input:
    edge = written["from"]
    source = (
        Published(dataset=edge["dataset"]) if "dataset" in edge else JobOutput(job=edge["job"], output=edge["output"])
    )
    return Input(from_=source, where=written["where"])


def _seconds(text: str | None) -> int | None:
    return None if text is None else int(text.removesuffix("s"))
