"""The delivery of a command: its body in the queue of the target, its trigger of a job, its row in the archive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from msgspec import Raw, Struct
from msgspec.json import Decoder, Encoder
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError

from interlock.stores.postgres import UNSTORABLE, Connection, queries
from interlock.tasks.triggers import accept_triggers
from interlock.wire.commands import Envelope, Metadata

_sql = queries(__name__, "path")

_COMMAND: Final = "command"
_INLINE: Final = 2_000
"""Bytes up to which PostgreSQL keeps a value inside its row, so that compression would gain nothing."""
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""The first bytes of zstd data; no JSON starts with them."""


class DeliveredCommand(Struct, frozen=True, gc=False):
    source: str
    """`org/service`."""
    target: str
    name: str
    payload: Raw


class Delivered(Struct, frozen=True, gc=False):
    """The body that the target receives."""

    metadata: Metadata
    command: DeliveredCommand


_encoder: Final = Encoder()
_decoder: Final = Decoder(Delivered)


def target_queue(org_id: UUID, queue: str) -> str:
    """Returns the name of a target's queue. It contains the org, so that no tenant can name a queue of another."""
    return f"bus:{org_id}:{queue}"


def body(envelope: Envelope, source: str) -> str:
    command = DeliveredCommand(source, envelope.command.target, envelope.command.name, Raw(envelope.payload))
    return _encoder.encode(Delivered(envelope.metadata, command)).decode()


def delivered(text: str) -> Delivered:
    return _decoder.decode(text)


async def trigger(
    connection: Connection, org_id: UUID, dag: str, job: str, *, source: str, command_id: str, body: str
) -> bool:
    """Triggers the job that a route leads to. Returns False if there is no such job or the body cannot be stored.

    It uses a savepoint, so that a body that cannot be stored does not abort the other commands of the transaction.
    """
    rows = await _sql.jobs_of_route(connection, org_id=org_id, dag_name=dag, name=job)
    jobs = [row["job_id"] for row in rows if row["kind"] == _COMMAND]
    if not jobs:
        return False
    try:
        async with connection.transaction():
            await accept_triggers(
                connection,
                job_ids=jobs,
                dedupe_keys=[f"command:{source}:{command_id}"] * len(jobs),
                payloads=[body] * len(jobs),
            )
    except UNSTORABLE:
        return False
    return True


# Accepted commands on their way to the archive


class AcceptedMetadata(Struct, frozen=True, gc=False):
    id: str
    timestamp: str
    version_id: str
    replay_id: str | None = None
    replay_reason: str | None = None


class AcceptedCommand(Struct, frozen=True, gc=False):
    source: str
    target: str
    name: str
    payload: Raw


class Accepted(Struct, frozen=True, gc=False):
    """A command that was answered with 202: delivered or escalated. Telemetry reports its later fate."""

    metadata: AcceptedMetadata
    command: AcceptedCommand


_packs: Final = Decoder(list[Accepted])
_compressor: Final = ZstdCompressor(level=1)
_decompressor: Final = ZstdDecompressor()


def packed(bodies: Sequence[str]) -> bytes:
    """Returns the bodies of one write as one value for the archive.

    Longer values are compressed. They stay in the database for seconds only, and uncompressed they would cost it more
    than the commands themselves.
    """
    pack = _encoder.encode([Raw(body) for body in bodies])
    return pack if len(pack) <= _INLINE else _compressor.compress(pack)


def unpacked(pack: bytes) -> list[Accepted]:
    """Reads a pack of commands. Raises ValueError if it is damaged."""
    try:
        return _packs.decode(_decompressor.decompress(pack) if pack.startswith(_MAGIC) else pack)
    except ZstdError as error:
        raise ValueError(f"a pack of commands cannot be decompressed: {error}") from None
