"""All settings, as one typed object.

A value comes from the first of these that sets it: the command line, an `INTERLOCK_…` environment variable,
`interlock.toml` in the working directory (or the file named by `INTERLOCK_CONFIG`), the default. `interlock config`
prints each setting with its origin.

    stores      databases, Valkey, object store
    network     addresses and limits of servers, URLs of clients, hosts that user-provided URLs may reach, webhooks
    access      capability tokens, object store credentials, users of an identity provider
    tasks       jobs, runtimes, queues, loops, workers
    execution   the session of a Spark worker, bundles and the runner for untrusted code
    query       the query service
    bus         the command bus
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from interlock.errors import ConfigurationError
from interlock.settings.access import Access
from interlock.settings.base import host_of, is_loopback, is_wildcard
from interlock.settings.bus import Bus
from interlock.settings.execution import Runner, Spark
from interlock.settings.network import Listeners, Outbound
from interlock.settings.query import Queries
from interlock.settings.stores import Stores
from interlock.settings.tasks import BUFFER_QUEUE, BUILT_IN_RUNTIMES, INGEST_QUEUE, Loops, Runtime, RuntimeKind, Tasks

__all__ = [
    "BUFFER_QUEUE",
    "BUILT_IN_RUNTIMES",
    "CONFIG_ENV",
    "DEFAULT_CONFIG",
    "INGEST_QUEUE",
    "Runtime",
    "RuntimeKind",
    "Settings",
    "config_file",
    "host_of",
    "is_loopback",
    "is_wildcard",
    "load",
    "origins",
]

CONFIG_ENV = "INTERLOCK_CONFIG"
DEFAULT_CONFIG = "interlock.toml"


def config_file() -> Path:
    return Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)


# Pydantic collects fields from the last base class first, so this order determines `interlock config` and the docs.
class Settings(Spark, Queries, Runner, Bus, Outbound, Loops, Tasks, Access, Listeners, Stores, BaseSettings):
    """All settings of all processes, validated and frozen."""

    model_config = SettingsConfigDict(env_prefix="INTERLOCK_", extra="forbid", frozen=True, env_nested_delimiter="__")

    # Telemetry
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, JSON elsewhere.")

    @model_validator(mode="after")
    def _only_in_development(self) -> Self:
        """Restricts HS256 to one machine: everyone who can verify such a token can also forge one."""
        if not self.development_tokens:
            return self
        for name in ("gateway", "internal", "query", "runner"):
            address = getattr(self, name)
            if not is_loopback(host_of(address)):
                raise ValueError(
                    f"development_tokens works on one machine only, and {name} = {address} is not a loopback address: "
                    "write 127.0.0.1:port, or remove development_tokens"
                )
        if self.signing != "pem" or self.objects_root.startswith("s3://") or self.runner_lambda is not None:
            raise ValueError(
                "development_tokens works on one machine only, and signing, objects_url or runner_lambda uses AWS: "
                'write signing = "pem", a file:// URL and no runner_lambda, or remove development_tokens'
            )
        return self

    @property
    def objects_base_url(self) -> str:
        """The URL at which the gateway serves a directory of objects."""
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


def load(**overrides: Any) -> Settings:
    """Returns the effective settings. Raises ConfigurationError with a sentence that names an invalid value."""
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
        return f"Unknown setting {name!r}; `interlock config` lists all settings."
    message = first["msg"].removeprefix("Value error, ")
    return f"Setting {name!r} (INTERLOCK_{name.upper()}) is invalid: {message}." if name else f"Settings: {message}."


def origins(settings: Settings, **overrides: Any) -> dict[str, str]:
    """Returns the origin of the value of each setting."""
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
