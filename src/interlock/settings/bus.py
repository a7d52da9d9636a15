"""The command bus: command path, telemetry, registry, archive and alerts."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from interlock.settings.base import Area, HostAndPort


class Bus(Area):
    """Settings of gateways that accept commands, and of `interlock serve bus`."""

    # The command path
    command_batch_limit: int = Field(
        1_000, ge=1, le=10_000, description="Maximum number of commands in one POST /v1/commands; more get 413."
    )
    command_window_seconds: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Maximum difference between the timestamp of a command and now, in either direction.",
    )
    command_fate_seconds: float = Field(
        3600.0,
        ge=60,
        description="The fate of a command that was pending can be read for this long after the decision.",
    )
    dispatch_mode: Literal["adaptive", "cold-only"] = Field(
        "adaptive", description="cold-only: every command takes the slow stage. A service can override this."
    )
    token_prefetchers: int = Field(
        5,
        ge=1,
        description="Maximum number of gateways that prefetch rate limit tokens of one command in the same second.",
    )
    fairness_strikes: int = Field(
        3, ge=1, description="A source that loses the warm path of a command this many times loses it on all gateways."
    )
    fairness_strike_seconds: float = Field(600.0, gt=0, description="Window in which fairness_strikes are counted.")
    fairness_ban_seconds: float = Field(
        600.0, gt=0, description="Duration of the loss of the warm path on all gateways."
    )
    fairness_refusals: int = Field(
        100,
        ge=1,
        description="After this many refusals for lack of capacity, all its commands of that kind are refused.",
    )
    audit_seconds: float = Field(
        60.0, gt=0, description="Interval at which gateways report usage per source and the auditor aggregates it."
    )

    # Telemetry of the command bus, emitted by `interlock serve bus`
    telemetry_seconds: float = Field(
        1.0,
        gt=0,
        description="Maximum delay before an event is delivered to its tenant; ten events are delivered immediately.",
    )
    telemetry_days: float = Field(
        14.0,
        gt=0,
        description="Telemetry that its tenant has not received for this long is dropped, and the tenant notified.",
    )
    bus_snapshots: bool = Field(
        True, description="Publish snapshots of the bus registry, and start from them; false: neither."
    )
    bus_snapshot_seconds: float = Field(
        45.0, ge=1, le=170, description="Interval between snapshots; a snapshot older than 180 s is not used."
    )
    bus_snapshot_limit_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="Larger snapshots are neither published nor loaded."
    )
    bus_key_rotation_days: float = Field(
        30.0, gt=0, le=3650, description="Age at which the signing keys of services are rotated."
    )
    bus_key_overlap_days: float = Field(
        7.0, ge=0, le=365, description="Time for which the old key stays valid after a rotation."
    )
    bus_config_poll_hours: float = Field(
        12.0, gt=0, le=720, description="Interval at which producers are asked to poll their configuration."
    )
    archive_seconds: float = Field(
        300.0,
        gt=0,
        description="Maximum time until an accepted command is archived; one archive file covers this period.",
    )
    archive_days: float = Field(30.0, gt=0, description="Archive files older than this are deleted.")
    monitor_seconds: float = Field(30.0, gt=0, description="Interval between checks of the queues of all routes.")
    alert_seconds: float = Field(
        300.0, ge=1, description="Events of the same kind and tenant within this time become one alert."
    )
    alert_mail_seconds: float = Field(5.0, gt=0, description="Interval at which alerts are sent by e-mail.")
    smtp_url: SecretStr | None = Field(
        None,
        description="smtp:// or smtps:// URL of the mail server for alerts, with user and password if required; "
        "smtp:// sends these only after STARTTLS. Unset: no e-mail is sent.",
    )
    smtp_from: str = Field("interlock@localhost", description="Sender address of alerts by e-mail.")
    bus_metrics: HostAndPort | None = Field(
        None,
        description="Loopback host:port where `interlock serve bus` serves its own metrics, for API keys with the "
        "scope platform; unset: no metrics.",
    )

    @field_validator("smtp_url")
    @classmethod
    def _mail_server(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"smtps?://[^\s/?#]+/?", value.get_secret_value()):
            raise ValueError("write smtp://host:port or smtps://user:password@host:port")
        return value
