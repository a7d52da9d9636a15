"""Addresses and credentials of the servers: from the settings, or from the folder of `interlock up`."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import msgspec
from pydantic import SecretStr

from interlock.errors import ConfigurationError
from interlock.settings import Settings

ENDPOINTS = "endpoints.json"
CREDENTIALS = "credentials.json"


class Access(NamedTuple):
    """Address, credential and TLS verification of a server."""

    url: str
    secret: str
    verify: ssl.SSLContext | bool


def gateway_access(settings: Settings) -> Access:
    """Returns the access that `Client` needs: the gateway and an API key."""
    url = settings.gateway_url or _left(settings, ENDPOINTS, "gateway", "INTERLOCK_GATEWAY_URL")
    return Access(url, _secret(settings, settings.api_key, "admin_key", "INTERLOCK_API_KEY"), _verify(settings))


def dispatcher_access(settings: Settings) -> Access:
    """Returns the access that `WorkerClient` needs: the dispatcher and a worker token."""
    url = settings.internal_url or _left(settings, ENDPOINTS, "internal", "INTERLOCK_INTERNAL_URL")
    token = _secret(settings, settings.worker_token, "worker_token", "INTERLOCK_WORKER_TOKEN")
    return Access(url, token, _verify(settings))


def query_access(settings: Settings) -> Access:
    """Returns the access that `QueryClient` needs: the query service and an API key."""
    url = settings.query_url or _left(settings, ENDPOINTS, "query", "INTERLOCK_QUERY_URL")
    return Access(url, _secret(settings, settings.api_key, "admin_key", "INTERLOCK_API_KEY"), _verify(settings))


def _secret(settings: Settings, given: SecretStr | None, name: str, variable: str) -> str:
    return given.get_secret_value() if given else _left(settings, CREDENTIALS, name, variable)


def _left(settings: Settings, file: str, name: str, variable: str) -> str:
    path = settings.dir / file
    value = _read(path).get(name)
    if not value and file == ENDPOINTS:
        raise ConfigurationError(
            f"Interlock is not running in {settings.dir}: interlock up. For one that runs elsewhere set {variable}, or "
            "pass the --dir with which it was started."
        )
    if not value:
        raise ConfigurationError(
            f"{path} has no {name}: set {variable}, or pass the --dir with which `interlock up` was started."
        )
    return value


def _read(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str], strict=False)
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error}): fix the file, or start `interlock up` again."
        ) from error


def _verify(settings: Settings) -> ssl.SSLContext | bool:
    return True if settings.tls_ca is None else ssl.create_default_context(cafile=str(settings.tls_ca))
