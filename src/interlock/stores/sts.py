"""Short-lived AWS credentials through STS AssumeRole."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from interlock.errors import TooLarge, Unavailable

SHORTEST_SECONDS: Final = 900
LONGEST_SECONDS: Final = 3600
"""Limits of STS, and the default maximum of a role."""
_CONNECT_SECONDS: Final = 3
_READ_SECONDS: Final = 10


@dataclass(frozen=True)
class AssumedRole:
    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expires_at: datetime


class Sts:
    """Uses the default AWS credential chain: environment, profile, or the role of the machine."""

    def __init__(self, role_arn: str, *, endpoint: str | None, region: str | None) -> None:
        self._role_arn = role_arn
        self._endpoint = endpoint
        self._region = region
        self._open = AsyncExitStack()
        self._opening = asyncio.Lock()
        # aioboto3 generates clients at run time, so they have no static types.
        self._client: Any = None

    async def assume(self, session: str, policy: str, seconds: int) -> AssumedRole:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - as below

        try:
            reply = await (await self._connected()).assume_role(
                RoleArn=self._role_arn,
                RoleSessionName=session,
                Policy=policy,
                DurationSeconds=max(SHORTEST_SECONDS, min(seconds, LONGEST_SECONDS)),
            )
        except ClientError as error:
            raise _refused(error.response.get("Error", {}).get("Code", "")) from error
        except (BotoCoreError, OSError) as error:
            raise _refused(type(error).__name__) from error
        given = reply["Credentials"]
        return AssumedRole(given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"], given["Expiration"])

    async def _connected(self) -> Any:
        """Returns the client of this process. Creating a client takes far longer than a request."""
        async with self._opening:
            if self._client is None:
                import aioboto3  # noqa: PLC0415 - slow import, needed only with a role to assume
                from botocore.config import Config  # noqa: PLC0415

                config = Config(
                    connect_timeout=_CONNECT_SECONDS, read_timeout=_READ_SECONDS, retries={"total_max_attempts": 2}
                )
                made = aioboto3.Session().client(
                    "sts", endpoint_url=self._endpoint, region_name=self._region, config=config
                )
                self._client = await self._open.enter_async_context(made)
        return self._client

    async def close(self) -> None:
        await self._open.aclose()


def _refused(why: str) -> TooLarge | Unavailable:
    if why == "PackedPolicyTooLarge":
        return TooLarge(
            "The session policy of this task is too large for STS. Reduce the inputs and outputs of the job, or "
            "shorten "
            "the prefix in objects_url.",
            code="policy_too_large",
        )
    return Unavailable(
        f"STS issued no credentials ({why}): check credentials_role_arn, sts_endpoint, and that the role trusts this "
        "dispatcher.",
        code="sts_unavailable",
    )
