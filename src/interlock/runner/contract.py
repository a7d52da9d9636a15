"""What a dispatcher asks of the runner. What it is told is the wire's RunnerReport."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.errors import BadRequest

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
Url = Annotated[str, Meta(pattern=r"^https?://[^\s/]+[^\s]*$(?!\n)", max_length=8_000)]
Language = Literal["python", "node", "bootstrap"]

WITHHELD: Final = "bundle_url"
"""Of an invocation, what is no part of the event that user code gets."""


class Limits(Struct, frozen=True):
    """Of one invocation. Processes count threads; disk and memory are of all its processes where the machine can."""

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
    """Whether objects_url is a store of objects, and not the gateway."""


class Invocation(Struct, frozen=True):
    """The fields that the runner looks at. All others are handed on as they are."""

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
    """The invocation, and the event that user code gets."""
    try:
        invocation = msgspec.json.decode(body, type=Invocation)
        event: dict[str, Any] = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"This is no invocation: {error}.") from None
    return invocation, {name: value for name, value in event.items() if name != WITHHELD}
