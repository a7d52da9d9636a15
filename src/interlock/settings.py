"""All settings, as one typed object.

A value comes from, in this order: the command line, `INTERLOCK_…` in the environment, `interlock.toml` in the working
directory (or the file named by `INTERLOCK_CONFIG`), the default. `interlock config` prints each with its origin.
"""

from __future__ import annotations

import os
import re
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from interlock.errors import ConfigurationError
from interlock.outbound.addresses import Exceptions

CONFIG_ENV = "INTERLOCK_CONFIG"
DEFAULT_CONFIG = "interlock.toml"


class RuntimeKind(StrEnum):
    QUEUE = "queue"
    """A worker receives a wake-up from the runtime's queue and claims."""
    INLINE = "inline"
    """The dispatcher itself runs it, from the outbox."""
    INVOKE = "invoke"
    """The dispatcher takes the lease and invokes a runner."""


class Runtime(BaseModel):
    """How jobs of one runtime execute, and what they get when their policy is silent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: RuntimeKind = RuntimeKind.QUEUE
    queue: str = ""
    """Name of the task queue; empty takes the runtime's own name."""
    alias_of: str | None = None
    lease_seconds: float = Field(60.0, gt=0)
    timeout_seconds: float = Field(3600.0, gt=0)
    memory_mb: int | None = None
    """Address-space limit of a child process, in MiB; unset for none."""
    image: str | None = None
    """Container image for deployments that start workers by image."""
    spark: bool = False
    """Tasks run in one Spark session of the worker, not in child processes of their own."""


BUILT_IN_RUNTIMES: dict[str, Runtime] = {
    "dispatcher": Runtime(kind=RuntimeKind.INLINE, lease_seconds=30, timeout_seconds=300),
    "lambda": Runtime(kind=RuntimeKind.INVOKE, timeout_seconds=900, memory_mb=1024),
    "platform": Runtime(),
    "ecs_platform": Runtime(alias_of="platform"),
    "udf": Runtime(memory_mb=1024, timeout_seconds=900),
    "ecs_udf": Runtime(alias_of="udf"),
    "spark": Runtime(spark=True, timeout_seconds=4 * 3600),
}


class Settings(BaseSettings):
    """Fields say their unit, and what turns them off."""

    model_config = SettingsConfigDict(env_prefix="INTERLOCK_", extra="forbid", frozen=True, env_nested_delimiter="__")

    dir: Path = Field(Path(".interlock"), description="Folder of all local state: servers, keys, objects, logs.")

    # Where the stores are. Unset means embedded, under `dir`.
    state_url: SecretStr | None = Field(None, description="postgresql:// URL of the state database; unset: embedded.")
    data_url: SecretStr | None = Field(None, description="postgresql:// URL of the data database; unset: embedded.")
    valkey_url: SecretStr | None = Field(None, description="valkey:// URL for coordination; unset: embedded.")
    objects_url: str | None = Field(None, description="Root of objects, file:// or s3://; unset: file://{dir}/objects.")
    objects_endpoint: str | None = Field(
        None, description="URL of a store beside AWS that speaks S3; unset: AWS_ENDPOINT_URL, or else AWS itself."
    )
    objects_region: str | None = Field(None, description="Region of the bucket of objects_url; unset: AWS_REGION.")
    objects_public_url: str | None = Field(
        None,
        description="Where holders of signed URLs find the gateway, when objects are in a directory; unset: "
        "gateway_url, or else the gateway's own address.",
    )
    object_limit_bytes: int = Field(
        5 * 1024**3, ge=1, description="Largest object that the gateway takes; its parts together have no more."
    )
    upload_stale_seconds: float = Field(
        24 * 3600.0, gt=0, description="An upload to the gateway in which nothing has happened for so long is removed."
    )
    database_connections: int = Field(10, ge=2, le=1000, description="Connections per process to the state database.")
    database_timeout_seconds: float = Field(
        30.0,
        gt=0,
        description="A statement of the control plane that takes longer, or a transaction that stands still longer, is "
        "ended and answered with 503.",
    )

    # Listeners
    gateway: str = Field("127.0.0.1:7070", description="host:port of the public gateway; port 0 takes a free one.")
    internal: str = Field(
        "127.0.0.1:7071", description="host:port of the internal dispatcher; port 0 takes a free one."
    )
    query: str = Field("127.0.0.1:7072", description="host:port of the query service; port 0 takes a free one.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain of both listeners; unset: plain HTTP.")
    tls_key: Path | None = Field(None, description="PEM private key of tls_cert.")
    tls_ca: Path | None = Field(None, description="PEM bundle that clients trust instead of the system's.")
    allow_plaintext_listener: bool = Field(
        False,
        description="Let a listener that is not loopback start without TLS, for a TLS-terminating proxy in front.",
    )
    body_limit_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Larger request bodies get 413.")
    requests_per_second: int = Field(
        0, ge=0, description="Per API key, counted in Valkey over one second; 0: no limit."
    )

    # Clients: the CLI, the SDK and workers
    gateway_url: str | None = Field(
        None, description="Where clients find the gateway; unset: from {dir}/endpoints.json."
    )
    internal_url: str | None = Field(
        None,
        description="Where workers find the dispatcher, and query services the keys of capability tokens; unset: "
        "{dir}/endpoints.json for workers, and the state database for the keys.",
    )
    query_url: str | None = Field(
        None, description="Where clients find the query service; unset: {dir}/endpoints.json."
    )
    api_key: SecretStr | None = Field(None, description="API key of the CLI and SDK; unset: {dir}/credentials.json.")
    org: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Which org the CLI and SDK speak for, when api_key is the token of a user in several; unset: the "
        "only one.",
    )
    worker_token: SecretStr | None = Field(None, description="Worker token; unset: {dir}/credentials.json.")

    # Capability tokens
    keys_dir: Path | None = Field(
        None, description="PEM signing keys, shared by all gateways and dispatchers; unset: {dir}/keys."
    )
    signing: Literal["pem", "kms"] = Field(
        "pem", description="Where rotations make or take signing keys: pem, files in keys_dir; kms, AWS KMS."
    )
    kms_key_id: str | None = Field(
        None,
        min_length=1,
        description="Id, ARN or alias of the KMS key that the next rotation takes, of the spec ECC_NIST_P256; unset: "
        "each rotation makes one.",
    )
    kms_endpoint: str | None = Field(
        None, description="URL of a service beside AWS that speaks KMS; unset: that of the region in the environment."
    )
    token_issuer: str = Field("interlock", min_length=1, description="`iss` of capability tokens.")
    token_ttl_seconds: float = Field(300.0, ge=10, le=3600, description="Life of a capability token.")
    credentials_role_arn: str | None = Field(
        None,
        description="Role that the dispatcher assumes to give tasks credentials for S3; unset: tasks get none for S3.",
    )
    sts_endpoint: str | None = Field(
        None, description="URL of the STS that has credentials_role_arn; unset: that of AWS for objects_region."
    )

    # Users of an identity provider
    oidc_issuer: str | None = Field(
        None, description="`iss` of an OpenID Connect provider whose users may be members; unset: API keys only."
    )
    oidc_audience: str | None = Field(None, min_length=1, description="`aud` that its tokens must have.")
    oidc_jwks_url: str | None = Field(
        None, description="Where its public keys are; unset: where {oidc_issuer}/.well-known/openid-configuration says."
    )

    # Jobs and tasks
    sync_threshold: int = Field(
        1000,
        ge=1,
        le=10_000,
        description="A POST /v1/jobs with more tasks is answered at once, and they are made in the background.",
    )
    batch_limit: int = Field(
        10_000, ge=1, le=100_000, description="Most tasks one POST /v1/jobs/{job}/tasks may carry."
    )
    shard_threshold: int = Field(
        10_000, ge=1, description="A run of a staged list with so many tasks has a table of its own."
    )
    spark_threshold_bytes: int = Field(
        8 << 30,
        ge=1,
        description="A staged list of JSONL or lines that is not packed and has so many bytes is read by Spark, if a "
        "worker of it is there.",
    )
    upload_hours: float = Field(
        24.0,
        gt=0,
        le=7 * 24,
        description="Life of an upload's URLs; a staged list is kept so long after it, or after a run was made of it.",
    )
    ingest_concurrency: int = Field(2, ge=1, le=100, description="Staged lists that one ingest process reads at once.")
    ingest_metrics: str | None = Field(
        None, description="Loopback host:port under which an ingest process serves its metrics; unset: it does not."
    )
    ingest_tries: int = Field(
        15, ge=1, description="How often a staged list is tried while a store is away, up to queue_max_receives."
    )
    range_size: int = Field(100, ge=1, le=10_000, description="Tasks behind one queue message of a run.")
    result_limit_bytes: int = Field(65_536, ge=0, description="Largest result of a task.")
    result_inline_bytes: int = Field(
        1024,
        ge=0,
        description="Results of tasks of runs up to this are kept in the state database; longer ones as objects, "
        "packed together.",
    )
    export_days: float = Field(7.0, gt=0, description="Files of exported runs are deleted after this.")
    payload_limit_bytes: int = Field(262_144, ge=1024, description="Largest payload of one task.")
    idempotency_hours: float = Field(24.0, gt=0, description="How long an Idempotency-Key is remembered.")
    retention_days: float = Field(
        14.0,
        gt=0,
        description="Ended runs and their tasks, ended tasks of DAGs, and events of datasets are deleted after this.",
    )
    runtimes: dict[str, Runtime] = Field(
        default_factory=dict, description="Added to, or replacing, the built-in runtimes."
    )

    # Queues
    queue_direct: bool = Field(
        True,
        description="Insert task messages in the transaction itself; false: through the outbox and the relay.",
    )
    queue_max_receives: int = Field(20, ge=1, description="A message received more often becomes a dead letter.")
    bulk_share: float = Field(
        0.1, ge=0, le=1, description="Share of receives that prefer bulk, so that it never starves."
    )

    # Loops of the dispatcher: pause between two passes that found nothing to do
    relay_seconds: float = Field(0.5, gt=0, description="Outbox relay.")
    retry_seconds: float = Field(0.25, gt=0, description="Retry scheduler.")
    reap_seconds: float = Field(0.5, gt=0, description="Lease reaper and hard timeouts.")
    fold_seconds: float = Field(0.1, gt=0, description="Run counters and run ends.")
    reconcile_seconds: float = Field(30.0, gt=0, description="Queued tasks without a message.")
    reconcile_grace_seconds: float = Field(60.0, ge=0, description="A queued task younger than this is left alone.")
    retention_seconds: float = Field(60.0, gt=0, description="Retention of runs, keys and idempotency records.")
    source_seconds: float = Field(1.0, gt=0, description="Sources that are always on.")
    schedule_seconds: float = Field(1.0, gt=0, description="Cron schedules, in `interlock scheduler`.")
    pressure_seconds: float = Field(1.0, gt=0, description="Queues against their max_queue_depth and max_queue_age.")
    sweep_seconds: float = Field(60.0, gt=0, description="Files of datasets that nobody needs any more.")
    sweep_grace_seconds: float = Field(
        600.0, ge=0, description="Files of an attempt that did not commit are deleted this long after it has ended."
    )
    replaced_files_seconds: float = Field(
        6 * 3600.0,
        ge=0,
        description="Files that were replaced stay this long for those who read them: longer than any task may take.",
    )
    sink_batch_limit_bytes: int = Field(
        1 << 30, ge=1, description="Largest batch of a buffered dataset; the sink refuses larger ones."
    )
    sink_spark_bytes: int = Field(
        256 << 20,
        ge=1,
        description="Batches of one dataset that wait and have together so many bytes are loaded by a task on Spark, "
        "if a Spark worker is there.",
    )
    sink_tries: int = Field(
        15, ge=1, description="How often the sink tries a batch while a store is away, up to queue_max_receives."
    )
    sink_metrics: str | None = Field(
        None, description="Loopback host:port under which a sink serves its own metrics; unset: it does not."
    )
    buffer_keep_seconds: float = Field(
        86_400.0, ge=0, description="The file of a batch is deleted this long after its rows were loaded."
    )
    buffer_refused_days: float = Field(
        14.0, gt=0, description="The file of a batch that was refused is kept so long, to be redriven."
    )
    backfill_seconds: float = Field(0.5, gt=0, description="Tasks of backfills, handed out as their queue has room.")
    backpressure_escalate_seconds: float = Field(
        5.0,
        ge=0,
        description="How long only bulk work is held back for a queue past its limit, before everything upstream is; "
        "0: everything at once.",
    )

    # Workers
    worker_concurrency: int = Field(0, ge=0, le=1000, description="Child processes of a worker; 0: one per core.")
    drain_seconds: float = Field(
        10.0, ge=0, description="How long a drain lets running tasks finish before giving them back."
    )

    # What URLs that users choose may lead to: those of http_fetch and of webhooks
    outbound_allow: list[str] = Field(
        default_factory=list,
        description="Addresses, networks (`10.1.0.0/16`) and hosts (`hooks.example`, `*.example`) that may be reached "
        "although they are not public.",
    )
    outbound_ports: list[int] = Field(default_factory=list, description="Ports that may be reached; empty: all.")
    outbound_proxy: SecretStr | None = Field(
        None, description="http:// URL of a forward proxy for http_fetch, with user and password if it wants them."
    )

    # Webhooks that are called when runs end
    webhook_seconds: float = Field(1.0, gt=0, description="Calls of webhooks, where no notification came.")
    webhook_concurrency: int = Field(
        32, ge=1, le=1000, description="Calls of webhooks that a dispatcher has open at once."
    )
    webhook_endpoint_concurrency: int = Field(
        4, ge=1, le=100, description="Calls of one webhook that are open at once, of all dispatchers together."
    )
    webhook_timeout_seconds: float = Field(10.0, gt=0, le=300, description="A call of a webhook may take so long.")
    webhook_tries: int = Field(15, ge=1, le=100, description="A call that has come to nothing so often is dead.")
    webhook_expire_hours: float = Field(
        24.0, gt=0, description="What a webhook could not be told for so long, be it paused or away, is dead."
    )
    webhook_keep: int = Field(
        10_000, ge=1, description="Calls of one webhook that are kept, for at most retention_days."
    )

    # The path of commands
    command_batch_limit: int = Field(
        1_000, ge=1, le=10_000, description="Most commands in one POST /v1/commands; more get 413."
    )
    command_window_seconds: float = Field(
        60.0, gt=0, le=3600, description="How far the timestamp of a command may be from now, before or after."
    )
    dispatch_mode: Literal["adaptive", "cold-only"] = Field(
        "adaptive", description="cold-only: every command by the slow stage. A service may have its own."
    )
    token_prefetchers: int = Field(
        5, ge=1, description="Gateways that may prefetch tokens of one command's limit in the same second."
    )
    fairness_strikes: int = Field(
        3, ge=1, description="A source that has lost the warm path of a command so often loses it in all gateways."
    )
    fairness_strike_seconds: float = Field(600.0, gt=0, description="Within so many seconds.")
    fairness_ban_seconds: float = Field(600.0, gt=0, description="How long it loses it then.")
    fairness_refusals: int = Field(
        100, ge=1, description="So many refusals later, for want of room, all its commands of that kind are refused."
    )
    audit_seconds: float = Field(
        60.0, gt=0, description="How often gateways report who sent how much, and the auditor adds it up."
    )

    # Telemetry of the command bus, in `interlock bus`
    telemetry_seconds: float = Field(
        1.0, gt=0, description="An event waits at most so long to be handed to its tenant; ten of them do not wait."
    )
    telemetry_days: float = Field(
        14.0, gt=0, description="Telemetry that its tenant has not taken for so long is dropped, and the tenant told."
    )
    bus_snapshots: bool = Field(
        True, description="Publish snapshots of the registry of the bus, and start from them; false: neither."
    )
    bus_snapshot_seconds: float = Field(
        45.0, ge=1, le=170, description="Time between two snapshots; one that is older than 180 s is not used."
    )
    bus_snapshot_limit_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="A larger snapshot is neither published nor loaded."
    )
    bus_key_rotation_days: float = Field(
        30.0, gt=0, le=3650, description="Keys that services sign commands with are replaced after so long."
    )
    bus_key_overlap_days: float = Field(
        7.0, ge=0, le=365, description="A key that was replaced is good for so long beside the new one."
    )
    bus_config_poll_hours: float = Field(
        12.0, gt=0, le=720, description="How often producers are told to ask for their configuration."
    )
    archive_seconds: float = Field(
        300.0, gt=0, description="An accepted command is in the archive after so long; a part of it is a file."
    )
    archive_days: float = Field(30.0, gt=0, description="Parts of the archive that are older are dropped.")
    monitor_seconds: float = Field(30.0, gt=0, description="Between two looks at the queues of all routes.")
    alert_seconds: float = Field(
        300.0, ge=1, description="Events of one kind of one tenant are one alert, within so long."
    )
    alert_mail_seconds: float = Field(5.0, gt=0, description="Alerts that are to be sent by e-mail.")
    smtp_url: SecretStr | None = Field(
        None,
        description="smtp:// or smtps:// URL of the mail server for alerts, with user and password if it wants them; "
        "unset: no mail is sent.",
    )
    smtp_from: str = Field("interlock@localhost", description="The sender of alerts by e-mail.")
    bus_metrics: str | None = Field(
        None, description="Loopback host:port under which `interlock bus` serves its own metrics; unset: it does not."
    )

    # Bundles, and the runner that runs them
    bundle_limit_bytes: int = Field(64 * 1024 * 1024, ge=1024, description="Largest zip of a bundle; larger gets 413.")
    bundle_unpacked_bytes: int = Field(512 * 1024 * 1024, ge=1024, description="Most bytes in all files of a bundle.")
    runner_url: str | None = Field(
        None, description="Where dispatchers find the runner of untrusted code; unset: there is none."
    )
    runner_token: SecretStr | None = Field(None, description="Secret that dispatchers and their runner share.")
    runner_lambda: str | None = Field(
        None, min_length=1, description="Name or ARN of an AWS Lambda function to use as the runner; unset: runner_url."
    )
    runner_lambda_endpoint: str | None = Field(
        None, description="Endpoint of AWS Lambda; unset: that of the region in the environment."
    )
    runner: str = Field(
        "127.0.0.1:0",
        description="host:port of the runner of untrusted code, loopback only; port 0 takes a free one.",
    )
    runner_concurrency: int = Field(0, ge=0, le=180, description="Invocations a runner has at once; 0: one per core.")
    runner_confinement: Literal["auto", "bubblewrap", "namespaces", "landlock", "none"] = Field(
        "auto",
        description="Walls around untrusted code; auto: the strongest that this machine has, and where there are "
        "none every invocation is refused. none: only limits and an empty environment, for code that you trust.",
    )
    runner_python: Path | None = Field(
        None, description="Python that runs handlers, 3.11 or newer; unset: the one that runs Interlock."
    )
    runner_first_user: int = Field(
        61_000,
        ge=1_000,
        le=2_000_000_000,
        description="A runner that is root runs each invocation as a user of its own: the first of 180 numbers.",
    )
    lambda_concurrency: int = Field(
        8, ge=1, le=1000, description="Invocations of the runner that a dispatcher has open at once."
    )
    lambda_cpu_seconds: int = Field(900, ge=1, description="Processor time of one invocation.")
    lambda_processes: int = Field(64, ge=1, description="Processes and threads of one invocation.")
    lambda_disk_mb: int = Field(512, ge=1, description="Disk space of one invocation, in MiB.")

    # Queries
    query_data_url: SecretStr | None = Field(
        None,
        description="postgresql:// URL of the data database for the query service, of a role that may read the tables "
        "of datasets and nothing else; unset: `interlock up` makes one in the embedded database, elsewhere only files "
        "can be queried.",
    )
    query_max_rows: int = Field(10_000, ge=1, description="Most rows of a JSON reply; what is beyond is left out.")
    query_max_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, description="Most bytes of a JSON reply; what is beyond is left out."
    )
    query_stream_bytes: int = Field(
        4 * 1024**3, ge=1024, description="Most bytes of a reply that is streamed; past it, the stream breaks off."
    )
    query_timeout_seconds: float = Field(60.0, gt=0, le=3600, description="A query that takes longer is ended.")
    query_memory_mb: int = Field(512, ge=64, description="Memory of one query, in MiB; beyond it, it uses disk.")
    query_temp_mb: int = Field(2048, ge=1, description="Disk space of one query, and of its export, in MiB.")
    query_threads: int = Field(2, ge=1, le=256, description="Threads of one query.")
    query_concurrency: int = Field(4, ge=1, le=1000, description="Queries that one query service runs at once.")
    query_queue: int = Field(16, ge=0, le=10_000, description="Queries that wait for a place; more get 429.")
    query_queue_seconds: float = Field(5.0, gt=0, description="How long a query waits for a place before it gets 429.")
    query_audit_days: float = Field(90.0, gt=0, description="Records of queries are deleted after this.")
    query_export_hours: float = Field(
        24.0, gt=0, le=7 * 24, description="Exported results of queries are deleted after this."
    )

    # Spark
    spark_master: str = Field("local[*]", min_length=1, description="Master URL of the session of a Spark worker.")
    spark_remote: SecretStr | None = Field(
        None,
        description="sc:// URL of a Spark Connect server, which is then used instead of spark_master; unset: none.",
    )
    spark_memory: str = Field(
        "2g",
        description="Heap of the Spark driver, which with a local master is all of Spark; such as 512m or 4g.",
    )
    spark_tasks: int = Field(
        0, ge=0, le=1000, description="Tasks that a Spark worker runs at once in its session; 0: two per core."
    )
    spark_conf: dict[str, SecretStr] = Field(
        default_factory=dict,
        description="Spark properties by name, which win over all others. Shown masked: they may be credentials.",
    )

    # Telemetry
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, JSON elsewhere.")

    @field_validator("gateway", "internal", "query", "runner", "sink_metrics", "ingest_metrics", "bus_metrics")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65_535:
            raise ValueError("write host:port, for example 127.0.0.1:7070")
        return value

    @field_validator(
        "gateway_url",
        "internal_url",
        "query_url",
        "runner_url",
        "runner_lambda_endpoint",
        "objects_endpoint",
        "objects_public_url",
        "kms_endpoint",
        "sts_endpoint",
    )
    @classmethod
    def _http_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("write a URL that starts with http:// or https://")
        return value

    @field_validator("outbound_allow")
    @classmethod
    def _exceptions(cls, value: list[str]) -> list[str]:
        Exceptions.read(value)
        return value

    @field_validator("outbound_ports")
    @classmethod
    def _ports(cls, value: list[int]) -> list[int]:
        if not all(0 < port < 65_536 for port in value):
            raise ValueError("write ports from 1 to 65535, for example [80, 443]")
        return value

    @field_validator("outbound_proxy")
    @classmethod
    def _proxy(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"http://[^\s/?#]+/?", value.get_secret_value()):
            raise ValueError("write http://host:port or http://user:password@host:port")
        return value

    @field_validator("smtp_url")
    @classmethod
    def _mail_server(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"smtps?://[^\s/?#]+/?", value.get_secret_value()):
            raise ValueError("write smtp://host:port or smtps://user:password@host:port")
        return value

    @field_validator("credentials_role_arn")
    @classmethod
    def _role(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"arn:[\w-]+:iam:[\w-]*:\d*(:?role)?/[\w+=,.@/-]{1,512}", value):
            raise ValueError("write the ARN of a role, for example arn:aws:iam::123456789012:role/interlock-task")
        return value

    @field_validator("oidc_issuer", "oidc_jwks_url")
    @classmethod
    def _issuer(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        local = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
        if not parts.hostname or parts.username or parts.fragment or not (parts.scheme == "https" or local):
            raise ValueError("write a URL that starts with https://; without TLS only one on this machine is believed")
        return value

    @field_validator("objects_url")
    @classmethod
    def _objects(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("file:///", "s3://")):
            raise ValueError("write file:///absolute/path or s3://bucket/prefix")
        return value

    @field_validator("spark_memory")
    @classmethod
    def _java_heap(cls, value: str) -> str:
        if not re.fullmatch(r"[1-9]\d*[kmgt]", value):
            raise ValueError("write a number and a unit of k, m, g or t, for example 512m or 4g")
        return value

    @field_validator("spark_remote")
    @classmethod
    def _spark_connect(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith("sc://"):
            raise ValueError("write a URL that starts with sc://, or set spark_master for a master URL")
        return value

    @field_validator("spark_conf", mode="before")
    @classmethod
    def _spark_properties(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in value:
            if not str(name).startswith("spark."):
                raise ValueError(f"{name!r} is no property of Spark, whose names begin with `spark.`")
        return {name: _as_spark_writes(one) for name, one in value.items()}

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or none")
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("oidc_issuer and oidc_audience go together: set both or none")
        for name in self.runtimes:
            self.runtime(name)
        return self

    def runtime(self, name: str) -> Runtime:
        """The runtime behind a name or an alias, its queue filled in. KeyError when there is none."""
        known = BUILT_IN_RUNTIMES | self.runtimes
        runtime = known[name]
        while runtime.alias_of is not None:
            name = runtime.alias_of
            if name not in known:
                raise ValueError(f"runtimes: alias_of {name!r} names no runtime; known: {', '.join(sorted(known))}")
            runtime = known[name]
        return runtime if runtime.queue else runtime.model_copy(update={"queue": name})

    @property
    def has_runner(self) -> bool:
        """Whether tasks of runtimes that are invoked can run here."""
        return self.runner_url is not None or self.runner_lambda is not None

    @property
    def runtime_names(self) -> list[str]:
        return sorted(BUILT_IN_RUNTIMES | self.runtimes)

    @property
    def queues(self) -> list[str]:
        names = {self.runtime(n).queue for n in self.runtime_names if self.runtime(n).kind is RuntimeKind.QUEUE}
        return sorted(names | {BUFFER_QUEUE, INGEST_QUEUE})

    @property
    def signing_keys_dir(self) -> Path:
        return self.keys_dir or self.dir / "keys"

    @property
    def objects_root(self) -> str:
        return (self.objects_url or f"file://{self.dir.absolute()}/objects").rstrip("/")

    @property
    def dispatcher_base_url(self) -> str:
        """Where untrusted code finds the dispatcher."""
        return (self.internal_url or f"{'https' if self.tls_cert else 'http'}://{self.internal}").rstrip("/")

    @property
    def query_base_url(self) -> str:
        """Where untrusted code finds the query service."""
        return (self.query_url or f"{'https' if self.tls_cert else 'http'}://{self.query}").rstrip("/")

    @property
    def objects_base_url(self) -> str:
        """Where the gateway serves a directory of objects."""
        own = f"{'https' if self.tls_cert else 'http'}://{self.gateway}"
        return (self.objects_public_url or self.gateway_url or own).rstrip("/")

    @property
    def bucket_region(self) -> str:
        """As AWS's own libraries find it, for code that has none of them."""
        named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return self.objects_region or named or "us-east-1"

    @property
    def bucket_base_url(self) -> str:
        """Where untrusted code finds the bucket of objects_url, whose name is in the path."""
        beside_aws = self.objects_endpoint or os.environ.get("AWS_ENDPOINT_URL")
        return (beside_aws or f"https://s3.{self.bucket_region}.amazonaws.com").rstrip("/")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, config_file())


def _as_spark_writes(value: Any) -> Any:
    """Numbers and truth values, as TOML and JSON have them, are text to Spark."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


BUFFER_QUEUE = "buffer"
"""Pointers to published batches of buffered datasets."""
INGEST_QUEUE = "ingest"
"""Runs whose tasks are to be made of a staged list."""


def config_file() -> Path:
    return Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)


def load(**overrides: Any) -> Settings:
    """The effective settings; a bad value becomes one sentence that names it and says what to write."""
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigurationError(_sentence(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{config_file()} is not valid TOML: {error}") from None


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"There is no setting {name!r}; `interlock config` lists them all."
    message = first["msg"].removeprefix("Value error, ")
    return f"Setting {name!r} (INTERLOCK_{name.upper()}) is wrong: {message}." if name else f"Settings: {message}."


def origins(settings: Settings, **overrides: Any) -> dict[str, str]:
    """For each setting, where its value came from."""
    path = config_file()
    in_file = tomllib.loads(path.read_text()) if path.is_file() else {}
    return {name: _origin(name, overrides, in_file, path) for name in type(settings).model_fields}


def _origin(name: str, overrides: dict[str, Any], in_file: dict[str, Any], path: Path) -> str:
    if overrides.get(name) is not None:
        return "command line"
    variable = f"INTERLOCK_{name.upper()}"
    if any(key.upper() == variable or key.upper().startswith(f"{variable}__") for key in os.environ):
        return f"environment ({variable})"
    return str(path) if name in in_file else "default"
