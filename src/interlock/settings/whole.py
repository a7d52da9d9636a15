"""The one object that processes are given, made of all areas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from interlock.settings.access import Access
from interlock.settings.area import host_of, is_loopback
from interlock.settings.bus import Bus
from interlock.settings.listeners import Listeners
from interlock.settings.loops import Loops
from interlock.settings.outbound import Outbound
from interlock.settings.queries import Queries
from interlock.settings.runner import Runner
from interlock.settings.spark import Spark
from interlock.settings.stores import Stores
from interlock.settings.tasks import Tasks

CONFIG_ENV = "INTERLOCK_CONFIG"
DEFAULT_CONFIG = "interlock.toml"


def config_file() -> Path:
    return Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)


# The last area's fields come first, in `interlock config` and in the documentation: pydantic reads bases backwards.
class Settings(Spark, Queries, Runner, Bus, Outbound, Loops, Tasks, Access, Listeners, Stores, BaseSettings):
    """Every setting of every process, checked and frozen."""

    model_config = SettingsConfigDict(env_prefix="INTERLOCK_", extra="forbid", frozen=True, env_nested_delimiter="__")

    # Telemetry
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, JSON elsewhere.")

    @model_validator(mode="after")
    def _only_in_development(self) -> Self:
        """Who verifies HS256 can sign it: that stays within one machine."""
        if not self.development_tokens:
            return self
        for name in ("gateway", "internal", "query", "runner"):
            address = getattr(self, name)
            if not is_loopback(host_of(address)):
                raise ValueError(
                    f"development_tokens is for one machine alone, and {name} = {address} is not a loopback address: "
                    "write 127.0.0.1:port, or leave development_tokens out"
                )
        if self.signing != "pem" or self.objects_root.startswith("s3://") or self.runner_lambda is not None:
            raise ValueError(
                "development_tokens is for one machine alone, and signing, objects_url or runner_lambda is AWS's: "
                'write signing = "pem", a file:// URL and no runner_lambda, or leave development_tokens out'
            )
        return self

    @property
    def objects_base_url(self) -> str:
        """Where the gateway serves a directory of objects."""
        own = f"{'https' if self.tls_cert else 'http'}://{self.gateway}"
        return (self.objects_public_url or self.gateway_url or own).rstrip("/")

    @property
    def signing_keys_dir(self) -> Path:
        return self.keys_dir or self.dir / "keys"

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
