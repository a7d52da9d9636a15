"""The command bus: its path, telemetry, registry, archive and alerts."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from interlock.settings.area import Area, HostAndPort


class Bus(Area):
    """Of gateways that take commands, and of `interlock bus`."""

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
        description="smtp:// or smtps:// URL of the mail server for alerts, with user and password if it wants them, "
        "which smtp:// sends only after STARTTLS; "
        "unset: no mail is sent.",
    )
    smtp_from: str = Field("interlock@localhost", description="The sender of alerts by e-mail.")
    bus_metrics: HostAndPort | None = Field(
        None, description="Loopback host:port under which `interlock bus` serves its own metrics; unset: it does not."
    )

    @field_validator("smtp_url")
    @classmethod
    def _mail_server(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(r"smtps?://[^\s/?#]+/?", value.get_secret_value()):
            raise ValueError("write smtp://host:port or smtps://user:password@host:port")
        return value
