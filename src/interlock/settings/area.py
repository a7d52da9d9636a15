"""What the areas of the settings share: how their fields are read, and the kinds of text that several have."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Area(BaseModel):
    """A part of `Settings`. Fields say their unit, and what turns them off."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError("write host:port, for example 127.0.0.1:7070")
    return value


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("write a URL that starts with http:// or https://")
    return value


HostAndPort = Annotated[str, AfterValidator(_host_and_port)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]


def host_of(address: str) -> str:
    """Of host:port."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
