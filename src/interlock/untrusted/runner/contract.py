"""The request of a dispatcher to the runner. The reply is `RunnerReport` of the wire."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.errors import BadRequest

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Url = Annotated[str, Meta(pattern=r"^https?://[^\s/]+[^\s]*$(?!\n)", max_length=8_000)]
Language = Literal["python", "node", "bootstrap"]

WITHHELD: Final = "bundle_url"
"""The field of an invocation that is removed from the event for user code."""


class Limits(Struct, frozen=True):
    """Limits of one invocation. `processes` includes threads. Disk and memory limits cover all its processes if the
    machine supports that."""

    memory_mb: Annotated[int, Meta(ge=32, le=1 << 20)]
    cpu_seconds: Annotated[int, Meta(ge=1, le=7 * 86_400)]
    timeout_seconds: Annotated[float, Meta(gt=0, le=7 * 86_400)]
    processes: Annotated[int, Meta(ge=1, le=10_000)]
    disk_mb: Annotated[int, Meta(ge=1, le=1 << 20)]


class Endpoints(Struct, frozen=True):
    dispatcher_url: Url
    query_url: Url | None = None
    objects_url: Url | None = None
    objects_in_bucket: bool = False
    """True if `objects_url` is an object store, False if it is the gateway."""


class Invocation(Struct, frozen=True):
    """The fields that the runner reads. All other fields are passed on unchanged."""

    task_id: Annotated[str, Meta(max_length=100)]
    attempt: int
    capability_token: Annotated[str, Meta(pattern=r"^[\x21-\x7e]+$(?!\n)", max_length=16_384)]
    bundle_url: Url
    bundle_sha256: Sha256
    entrypoint: Annotated[str, Meta(max_length=500)]
    language: Language
    endpoints: Endpoints
    limits: Limits


def read(body: bytes) -> tuple[Invocation, dict[str, Any]]:
    """Returns the invocation, and the event for user code."""
    try:
        invocation = msgspec.json.decode(body, type=Invocation)
        event: dict[str, Any] = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not an invocation: {error}.") from None
    return invocation, {name: value for name, value in event.items() if name != WITHHELD}
