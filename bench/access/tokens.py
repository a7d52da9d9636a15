"""Issue and verification of capability tokens, compared with bare ES256 over the same bytes with the same key."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID, uuid4

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from interlock.access.tokens import CapabilityTokens, Grant, read_prefix, write_grants
from interlock.apps.app import App, open_app
from interlock.settings import Settings
from interlock.wire.attempts import TaskInput
from interlock.wire.jobs import DatasetRef

_ES256: Final = ec.ECDSA(SHA256())
_ROOT: Final = "s3://bench/objects"


def grant() -> Grant:
    """Returns the grant of an attempt that reads two datasets of files and writes one."""
    task_id = uuid4()
    outputs = write_grants(_ROOT, task_id, 1, [DatasetRef(dataset_uuid=uuid4(), dataset_version=uuid4())])
    return Grant(uuid4(), task_id, 1, outputs, [_input(index, uuid4(), uuid4()) for index in range(2)])


def _input(index: int, dataset: UUID, version: UUID) -> TaskInput:
    prefix = read_prefix(_ROOT, dataset, version)
    return TaskInput(
        input_index=index, dataset_uuid=dataset, dataset_version=version, storage="parquet", read_prefix=prefix
    )


class Rates:
    """Calls per second, one figure per round."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)

    def note(self, name: str, count: int, began: float) -> None:
        self.found[name].append(count / (time.perf_counter() - began))


async def tokens(settings: Settings, count: int, rounds: int) -> dict[str, Any]:
    """Measures tokens per second. A round issues new tokens, verifies them for the first time, and again."""
    rates, size = Rates(), 0
    async with open_app(settings, process="bench") as parts:
        (kid,) = [key.kid for key in await parts.access.keyring.keys() if key.retired_at is None]
        await _round(parts, kid, count // 10 or 1, Rates())
        for _ in range(rounds):
            size = await _round(parts, kid, count, rates)
    return {"bytes": size, "count": count, **rates.found}


async def _round(parts: App, kid: str, count: int, rates: Rates) -> int:
    """Runs one round and returns the size of a token in bytes."""
    issuer = _fresh_issuer(parts)
    grants = [grant() for _ in range(count)]
    began = time.perf_counter()
    issued = await issuer.issue(grants, kid)
    rates.note("issued", count, began)
    _bare(parts.access.keyring.signers.pem.private(kid), issued, rates)
    for name in ("verified", "verified_again"):
        began = time.perf_counter()
        for token in issued:
            await issuer.verify(token)
        rates.note(name, count, began)
    return len(issued[0])


def _fresh_issuer(parts: App) -> CapabilityTokens:
    """Returns an issuer that has not verified anything yet."""
    settings = parts.settings
    return CapabilityTokens(
        parts.stores.database,
        parts.access.keyring,
        parts.stores.clock,
        issuer=settings.token_issuer,
        ttl_seconds=settings.token_ttl_seconds,
    )


def _bare(key: ec.EllipticCurvePrivateKey, issued: Sequence[str], rates: Rates) -> None:
    messages = [token.rpartition(".")[0].encode() for token in issued]
    began = time.perf_counter()
    signatures = [key.sign(message, _ES256) for message in messages]
    rates.note("bare_sign", len(issued), began)
    public = key.public_key()
    began = time.perf_counter()
    for message, signature in zip(messages, signatures, strict=True):
        public.verify(signature, message, _ES256)
    rates.note("bare_verify", len(issued), began)
