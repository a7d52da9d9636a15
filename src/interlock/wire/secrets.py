"""Secrets of an org: set by its admins, named in configs as `${secret:NAME}`, and never read back."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Final

from msgspec import Meta, Struct, field

from interlock.wire.base import Reply, Request

SHORTEST: Final = 8
"""Characters of a value. Shorter ones would be redacted wherever they occur by chance."""
LONGEST: Final = 8_192
NAMED: Final = r"^[A-Za-z_][A-Za-z0-9_-]{0,99}\Z"
"""The pattern of a secret's name."""

_reference = re.compile(r"\$\{secret:([^}]*)\}")


def secret_names(config: str) -> list[str]:
    """Names in `${secret:NAME}` of a config, each once, as they are written. Some may be no valid names."""
    return list(dict.fromkeys(_reference.findall(config)))


class OrgSecretRequest(Request, frozen=True, kw_only=True):
    """`PUT /v1/secrets/{name}`."""

    value: Annotated[str, Meta(min_length=SHORTEST, max_length=LONGEST)]
    hosts: Annotated[list[Annotated[str, Meta(min_length=1, max_length=260)]], Meta(max_length=20)] = field(
        default_factory=list
    )
    """Hosts that the value may be sent to, such as `rpc.example.com` or `rpc.example.com:8545`; empty: all."""

    def __repr__(self) -> str:
        return f"OrgSecretRequest(hosts={self.hosts!r})"


class OrgSecretView(Reply, frozen=True, kw_only=True):
    """What may be known of a secret. There is no reply that has its value."""

    name: str
    hosts: list[str]
    version: int
    """1 for the first value, and one more for each later one."""
    set_by: str
    set_at: datetime


class OrgSecretPage(Reply, frozen=True, kw_only=True):
    secrets: list[OrgSecretView]
    next_cursor: str | None = None


class TaskSecret(Struct, array_like=True, frozen=True):
    """A secret that a claimed task's config names, for the worker that holds the task."""

    name: str
    value: str | None
    """None when there is no such secret, or when it cannot be opened; `problem` says which."""
    hosts: list[str]
    problem: str | None = None
    missing: bool = False

    def __repr__(self) -> str:
        return f"TaskSecret({self.name!r})"
