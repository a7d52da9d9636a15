"""Signers: ES256 with a PEM file, or with an AWS KMS key of spec ECC_NIST_P256, which never leaves KMS."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

import aioboto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from interlock.errors import ConfigurationError, InterlockError, Unavailable

_ALGORITHM: Final = ec.ECDSA(SHA256())
ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve P-256."""


@dataclass(frozen=True)
class NewKey:
    """A key that a signer can use from now on."""

    jwk: Mapping[str, str]
    """The public key."""
    kms_key: str | None = None
    """The ARN in KMS; None for a PEM file, which is named after its kid."""
    made_here: bool = True
    """False for a key that an operator created, who also has to delete it."""

    @property
    def kid(self) -> str:
        return self.jwk["kid"]

    @property
    def handle(self) -> str:
        return self.kms_key or self.kid


class Signer(Protocol):
    elsewhere: ClassVar[bool]
    """True if a signature is a network request, so that callers should request many concurrently."""

    async def make(self) -> NewKey: ...
    async def sign(self, handle: str, message: bytes) -> bytes:
        """Returns 64 bytes, r and s, with the smaller of the two valid values of s."""
        ...

    async def discard(self, handle: str) -> None:
        """Deletes a key. Idempotent."""
        ...

    async def close(self) -> None: ...


class PemSigner:
    """Signs with a folder of private keys that all gateways and dispatchers share."""

    elsewhere: ClassVar[bool] = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._private: dict[str, ec.EllipticCurvePrivateKey] = {}

    async def make(self) -> NewKey:
        key = ec.generate_private_key(ec.SECP256R1())
        made = NewKey(jwk_of(key.public_key()))
        self._write(made.kid, key)
        return made

    async def sign(self, handle: str, message: bytes) -> bytes:
        return raw_signature(self.private(handle).sign(message, _ALGORITHM))

    async def discard(self, handle: str) -> None:
        self._path(handle).unlink(missing_ok=True)
        self._private.pop(handle, None)

    async def close(self) -> None:
        self._private.clear()

    def private(self, kid: str) -> ec.EllipticCurvePrivateKey:
        if kid not in self._private:
            self._private[kid] = self._read(kid)
        return self._private[kid]

    def _path(self, kid: str) -> Path:
        return self._directory / f"{kid}.pem"

    def _write(self, kid: str, key: ec.EllipticCurvePrivateKey) -> None:
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self._path(kid), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, kid: str) -> ec.EllipticCurvePrivateKey:
        try:
            key = serialization.load_pem_private_key(self._path(kid).read_bytes(), password=None)
        except FileNotFoundError:
            raise ConfigurationError(
                f"The active signing key {kid} is not in {self._directory}. Copy its PEM file there (all dispatchers "
                "share keys_dir), or create a new key with `interlock signing-key rotate`."
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigurationError(f"{self._path(kid)} is not an elliptic-curve private key; restore the file.")
        return key


class Signers:
    """The signers of a process. Both kinds stay usable while an installation switches from one to the other."""

    def __init__(
        self, directory: Path, *, kind: Literal["pem", "kms"], kms_key: str | None, endpoint: str | None
    ) -> None:
        self.pem = PemSigner(directory)
        self._kind = kind
        self._kms_key = kms_key
        self._endpoint = endpoint

    @cached_property
    def kms(self) -> Signer:
        # Costs 0.5 s of imports, which only installations with keys in KMS pay.

        return KmsSigner(self._kms_key, endpoint=self._endpoint)

    @property
    def of_new_keys(self) -> Signer:
        return self.kms if self._kind == "kms" else self.pem

    async def close(self) -> None:
        if "kms" in self.__dict__:
            await self.kms.close()


def raw_signature(der: bytes) -> bytes:
    """Converts to the format of JWTs, with the smaller `s`, so that nobody can derive a second valid signature."""
    r, s = decode_dss_signature(der)
    return r.to_bytes(32) + min(s, ORDER - s).to_bytes(32)


def jwk_of(key: ec.EllipticCurvePublicKey) -> dict[str, str]:
    numbers = key.public_numbers()
    x, y = (_base64(n.to_bytes(32)) for n in (numbers.x, numbers.y))
    # RFC 7638: the kid is the thumbprint of the key.
    thumbprint = hashlib.sha256(f'{{"crv":"P-256","kty":"EC","x":"{x}","y":"{y}"}}'.encode()).digest()
    return {"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": _base64(thumbprint), "alg": "ES256", "use": "sig"}


def public_key(jwk: Mapping[str, str]) -> ec.EllipticCurvePublicKey:
    """Parses a JWK. Raises ValueError if it is not a point on the curve."""
    x, y = (int.from_bytes(base64.urlsafe_b64decode(jwk[part] + "==")) for part in ("x", "y"))
    return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


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
