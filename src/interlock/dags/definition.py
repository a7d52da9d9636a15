"""A DAG: its jobs, their edges, what it publishes. Typed, frozen, with every default filled in.

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

from interlock.wire import OperatorName, Policy, Priority, Role, Scaling

PATH_NAME: Final = r"^[A-Za-z0-9](?!.*\.\.)[A-Za-z0-9._-]*$(?!\n)"
PathName = Annotated[str, Meta(min_length=1, max_length=100, pattern=PATH_NAME)]
"""Fits into a URL, a file name and an object key as it stands. No colon: Hadoop takes it for a scheme."""
ColumnName = Annotated[str, Meta(min_length=1, max_length=255)]
UniqueKey = Annotated[tuple[ColumnName, ...], Meta(max_length=32)]
DurationSeconds = Annotated[int, Meta(ge=1, le=366 * 86_400)]
"""Written with its unit, such as 10m; kept as whole seconds."""


class Activation(StrEnum):
    SOURCE = "source"
    """Starts by itself: always on, by the clock, or when told."""
    REACTIVE = "reactive"
    """Runs when one of its inputs has changed."""


class SourceKind(StrEnum):
    ALWAYS_ON = "always_on"
    CRON = "cron"
    WEBHOOK = "webhook"
    MANUAL = "manual"
    COMMAND = "command"


class CatchUp(StrEnum):
    """What happens to times that went by while nobody was there to start them."""

    NONE = "none"
    LATEST = "latest"
    ALL = "all"


class WebhookAuth(StrEnum):
    HMAC = "hmac"
    TOKEN = "token"  # noqa: S105 - the name of a way to sign, not a secret


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
    """What becomes of a row whose unique_key a buffered output has already."""

    NOTHING = "nothing"
    UPDATE = "update"


class _Part(Struct, frozen=True, kw_only=True):
    """A piece of a definition."""


class Source(_Part, frozen=True, kw_only=True):
    """What starts a source job."""

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
    """An edge to a dataset by its published name, of this DAG or of another."""

    dataset: PathName


class Input(_Part, frozen=True, kw_only=True):
    from_: JobOutput | Published = field(name="from")
    where: str | None = None
    """Canonical text; see conditions.py."""


class Output(_Part, frozen=True, kw_only=True):
    name: PathName
    storage: Storage = Storage.PARQUET
    unique_key: UniqueKey = ()
    """Columns that tell rows apart; empty takes the job's."""
    columns: dict[ColumnName, str] = field(default_factory=dict)
    """Of a buffered output, which takes no others: types as Spark names them, `not null` behind."""
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
    """In the order that `output_index` counts."""
    config: dict[str, Any] = field(default_factory=dict)
    execution_strategy: ExecutionStrategy = ExecutionStrategy.PER_PARTITION
    update_strategy: UpdateStrategy = UpdateStrategy.REPLACE
    unique_key: UniqueKey = ()
    max_queue_depth: Annotated[int, Meta(ge=1, le=100_000_000)] | None = None
    max_queue_age: DurationSeconds | None = None
    priority: Priority = Priority.NORMAL
    scaling: Scaling = field(default_factory=Scaling)
    policy: Policy = field(default_factory=Policy)
    """Written without a heading of its own: its fields stand beside the others."""

    def output(self, name: str) -> Output | None:
        return next((output for output in self.outputs if output.name == name), None)


class Publication(_Part, frozen=True, kw_only=True):
    from_: JobOutput = field(name="from")
    read_roles: tuple[Role, ...] = tuple(Role)
    """Whose keys may read it, in the order that roles have."""


class Dag(_Part, frozen=True, kw_only=True):
    name: PathName
    jobs: tuple[Job, ...]
    """As the file orders them."""
    publish: dict[PathName, Publication] = field(default_factory=dict)

    def job(self, name: str) -> Job | None:
        return next((job for job in self.jobs if job.name == name), None)


# The fields of a job as a file writes them

_WRITTEN: Final = {"lease_seconds": "heartbeat_timeout_seconds"}
"""A lease is what a missing heartbeat ends: DAGs call it by what people observe."""
POLICY_FIELDS: Final = {_WRITTEN.get(each.name, each.name): each for each in msgspec.structs.fields(Policy)}
JOB_FIELDS: Final = {each.name: each for each in msgspec.structs.fields(Job) if each.name != "policy"} | POLICY_FIELDS
DEFAULTABLE: Final = frozenset(
    {"runtime", "execution_strategy", "max_queue_depth", "max_queue_age", "priority", "scaling", *POLICY_FIELDS}
)
"""What `defaults` may say for all jobs."""


def job_of(values: dict[str, Any]) -> Job:
    """A job from values under the names that a file writes."""
    policy = {each.name: values[name] for name, each in POLICY_FIELDS.items() if name in values}
    own = {name: value for name, value in values.items() if name not in POLICY_FIELDS}
    return Job(**own, policy=Policy(**policy))


# Canonical form


def document(dag: Dag) -> dict[str, Any]:
    """The canonical form as a file could write it: reading it gives the same definition."""
    jobs = sorted((_job_document(job) for job in dag.jobs), key=lambda job: str(job["name"]))
    return {"name": dag.name, "jobs": jobs, "publish": msgspec.to_builtins(dag.publish)}


def _job_document(job: Job) -> dict[str, Any]:
    written: dict[str, Any] = msgspec.to_builtins(job)
    policy = written.pop("policy")
    written |= {name: policy[each.name] for name, each in POLICY_FIELDS.items()}
    written["max_queue_age"] = job.max_queue_age and f"{job.max_queue_age}s"
    for output in written["outputs"]:
        if output["storage"] != Storage.BUFFERED:
            # They have no say in it: a file means the same as before there were any.
            for name in OF_BUFFERED:
                del output[name]
    if job.source is None:
        del written["source"]
    else:
        written["source"] = source_document(job.source)
    return written


def source_document(source: Source) -> dict[str, Any]:
    """Without what does not belong to its kind: that has no say in what the job does."""
    written: dict[str, Any] = msgspec.to_builtins(source)
    written["misfire_grace"] = f"{source.misfire_grace}s"
    foreign = set(written) - {"kind"} - fields_of(source.kind)
    return {name: value for name, value in written.items() if name not in foreign}


def fields_of(kind: SourceKind) -> frozenset[str]:
    """What a source of this kind may say beside its kind."""
    return {SourceKind.CRON: OF_CRON, SourceKind.WEBHOOK: OF_WEBHOOK}.get(kind, frozenset())


def canonical(dag: Dag) -> bytes:
    return msgspec.json.encode(document(dag), order="sorted")


def content_hash(dag: Dag) -> str:
    return hashlib.sha256(canonical(dag)).hexdigest()


def job_hash(job: Job) -> str:
    """Of the job's own definition: what stands upstream of it has no part in it."""
    return hashlib.sha256(msgspec.json.encode(_job_document(job), order="sorted")).hexdigest()


TUNING: Final = frozenset({"max_queue_depth", "max_queue_age", "priority", "scaling", *POLICY_FIELDS})
"""How a job's tasks are run, not what they make: changed in place, and nothing is built anew for it."""


def build_hash(job: Job) -> str:
    """Of what decides about the job's outputs: its definition without tuning, and of a source only its kind."""
    written = {name: value for name, value in _job_document(job).items() if name not in TUNING}
    if job.source is not None:
        written["source"] = job.source.kind
    return hashlib.sha256(msgspec.json.encode(written, order="sorted")).hexdigest()


# Back from the canonical form


def dag_of(content: bytes | str) -> Dag:
    """The DAG of a canonical document. It was checked when it was written: nothing is checked again."""
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
