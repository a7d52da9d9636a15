"""The base class of the settings areas, and types that several areas share."""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict


class Area(BaseModel):
    """A part of `Settings`. Each field documents its unit and the value that disables it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError("write host:port, for example 127.0.0.1:7070")
    return value


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError("write a URL that starts with http:// or https://")
    if is_wildcard(urlsplit(value).hostname or ""):
        raise ValueError(f"{value} is a wildcard address: write the name or address that clients connect to")
    return value


HostAndPort = Annotated[str, AfterValidator(_host_and_port)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]


def host_of(address: str) -> str:
    """Returns the host of `host:port`, without the brackets of an IPv6 address."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Returns True for addresses such as 0.0.0.0 and ::, which listen on all addresses of the machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            return socket.inet_aton(host) == bytes(4)  # other spellings that bind() accepts: 0, 0x0, 0.0
        except OSError:
            return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_unspecified
