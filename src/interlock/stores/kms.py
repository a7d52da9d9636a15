"""A signer whose keys never leave AWS KMS: ES256 with keys of spec ECC_NIST_P256."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any, ClassVar, Final

import aioboto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from interlock.errors import ConfigurationError, InterlockError, Unavailable
from interlock.stores.signers import NewKey, jwk_of, raw_signature

_CONFIG: Final = Config(
    connect_timeout=3,
    read_timeout=5,
    retries={"mode": "standard", "total_max_attempts": 3},
    # The signatures of a batch of claims are requested concurrently.
    max_pool_connections=50,
)
# A retry does not help; an operator must change a setting, a policy or a key.
_WRONG: Final = frozenset(
    {
        "AccessDeniedException",
        "DisabledException",
        "IncompleteSignature",
        "InvalidArnException",
        "InvalidClientTokenId",
        "InvalidKeyUsageException",
        "InvalidSignatureException",
        "KMSInvalidStateException",
        "NotFoundException",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
        "UnsupportedOperationException",
        "ValidationException",
    }
)
_GONE: Final = frozenset({"KMSInvalidStateException", "NotFoundException"})
_SHORTEST_WAIT_DAYS: Final = 7
"""Minimum waiting period that KMS allows before it deletes a key."""


class KmsSigner:
    """`key_id` is the key or alias that the next rotation uses; if None, each rotation creates a key."""

    elsewhere: ClassVar[bool] = True

    def __init__(self, key_id: str | None, *, endpoint: str | None) -> None:
        self._key_id = key_id
        self._endpoint = endpoint
        self._open = AsyncExitStack()
        self._opening = asyncio.Lock()
        # aioboto3 generates clients at run time, so they have no static types.
        self._client: Any = None

    async def make(self) -> NewKey:
        """Creates or looks up a key. Stores the ARN of the key and not its alias, which may change."""
        if self._key_id is not None:
            return await self._described(self._key_id, made_here=False)
        with _kms_errors("create a key"):
            made = await (await self._kms()).create_key(
                KeySpec="ECC_NIST_P256", KeyUsage="SIGN_VERIFY", Description="Interlock: signs capability tokens"
            )
        return await self._described(made["KeyMetadata"]["Arn"], made_here=True)

    async def sign(self, handle: str, message: bytes) -> bytes:
        # Signs the digest, because KMS accepts messages of at most 4 KiB.
        with _kms_errors(f"sign with {handle}", wrong=Unavailable):
            reply = await (await self._kms()).sign(
                KeyId=handle,
                Message=hashlib.sha256(message).digest(),
                MessageType="DIGEST",
                SigningAlgorithm="ECDSA_SHA_256",
            )
        return raw_signature(reply["Signature"])

    async def discard(self, handle: str) -> None:
        """Schedules the deletion of a key. KMS waits for days, so a mistake can be undone."""
        with _kms_errors(f"delete {handle}", wrong=Unavailable):
            try:
                await (await self._kms()).schedule_key_deletion(KeyId=handle, PendingWindowInDays=_SHORTEST_WAIT_DAYS)
            except ClientError as error:
                if _code(error) not in _GONE:
                    raise

    async def close(self) -> None:
        await self._open.aclose()

    async def _described(self, key_id: str, *, made_here: bool) -> NewKey:
        with _kms_errors(f"return the public key of {key_id}"):
            shown = await (await self._kms()).get_public_key(KeyId=key_id)
        if shown.get("KeySpec") != "ECC_NIST_P256" or shown.get("KeyUsage") != "SIGN_VERIFY":
            raise _unfit(key_id)
        return NewKey(jwk_of(_public(shown["PublicKey"], key_id)), kms_key=shown["KeyId"], made_here=made_here)

    async def _kms(self) -> Any:
        """Returns the client of this process. Creating a client takes far longer than a request."""
        async with self._opening:
            if self._client is None:
                session = aioboto3.Session(region_name=_region(self._key_id))
                client = session.client("kms", endpoint_url=self._endpoint, config=_CONFIG)
                self._client = await self._open.enter_async_context(client)
        return self._client


def _region(key_id: str | None) -> str | None:
    """Returns the region of an ARN, otherwise of the environment: botocore reads only AWS_DEFAULT_REGION itself."""
    arn = (key_id or "").split(":")
    return arn[3] if len(arn) == 6 else os.environ.get("AWS_REGION")


def _public(der: bytes, key_id: str) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(der)
    except (ValueError, UnsupportedAlgorithm):
        raise _unfit(key_id) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _unfit(key_id)
    return key


def _unfit(key_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"The KMS key {key_id} cannot sign capability tokens: kms_key_id must name one with the key spec ECC_NIST_P256 "
        "and the key usage SIGN_VERIFY."
    )


@contextmanager
def _kms_errors(what: str, *, wrong: type[InterlockError] = ConfigurationError) -> Iterator[None]:
    """Converts errors of AWS.

    `wrong` is for errors that an operator must fix: fatal at start, retried while running.
    """
    try:
        yield
    except ClientError as error:
        if _code(error) in _WRONG:
            raise wrong(
                f"KMS refuses to {what} ({_code(error)}): check kms_key_id, the state of the key, and that its policy "
                "allows this process to use it.",
                code=None if wrong is ConfigurationError else "kms_unavailable",
            ) from error
        raise Unavailable(f"KMS currently cannot {what} ({_code(error)}).", code="kms_unavailable") from error
    except (BotoCoreError, OSError, TimeoutError) as error:
        raise Unavailable(
            f"KMS does not respond ({type(error).__name__}): check kms_endpoint, the region and the credentials in the "
            "environment.",
            code="kms_unavailable",
        ) from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))
