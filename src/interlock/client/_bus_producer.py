"""Sends commands: signed with the newest key of the service, in batches, retried after the delay that the bus returns.

A command keeps its id across retries, so a route with strict deduplication accepts it once. Each retry has a fresh
timestamp and signature, because a signed message is valid for one minute and a key may be rotated.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Self
from uuid import uuid4

import msgspec
from msgspec import Raw, Struct

from interlock.client._caller import Caller, bearer
from interlock.errors import BadRequest, CommandRefused, ServerUnreachable, Unavailable
from interlock.wire.bus_registry import TenantConfig
from interlock.wire.commands import CommandVerdict, CommandVerdicts, NotCanonical, compose

BATCH: Final = 100
_PATIENCE_SECONDS: Final = 20.0
"""Retry limit of one request. Shorter than the window in which the message signed for it is valid."""
_LONGEST_WAIT_SECONDS: Final = 60.0
_UNHINTED_SECONDS: Final = 1.0
_STALE_KEY: Final = frozenset({"unknown_key", "expired_key", "invalid_hmac"})
_PASSING: Final = frozenset({"rate-limit-exceeded", "fairness-violation", "delivery-failure"})
"""Transient failures."""

_config = msgspec.json.Decoder(TenantConfig)
_verdicts = msgspec.json.Decoder(CommandVerdicts)
_json = msgspec.json.Encoder()


def _new_id() -> str:
    return str(uuid4())


class Command(Struct, frozen=True, kw_only=True):
    """A command to a target service. Two commands with the same `command_id` are the same command."""

    target: str
    name: str
    payload: Any = None
    """Any JSON value; `msgspec.Raw` is sent unchanged."""
    command_id: str = msgspec.field(default_factory=_new_id)


class Producer:
    """Sends commands as the service of the API key. Share one instance among the tasks of a process."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        patience: float = 60.0,
        verify: ssl.SSLContext | bool = True,
        now: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """`patience`: for how many seconds a command with a transient failure is retried."""
        self._caller = Caller(url, bearer(api_key, None), verify=verify, patience=min(patience, _PATIENCE_SECONDS))
        self._patience = patience
        self._now = now
        self._pause = pause
        self._known: TenantConfig | None = None
        self._poll_at = 0.0
        self._polling = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._caller.close()

    async def send(
        self, target: str, name: str, payload: Any = None, *, command_id: str | None = None
    ) -> CommandVerdict:
        """Sends one command. Raises CommandRefused, with the verdict, if the outcome is `failed` or `invalid`."""
        command = Command(target=target, name=name, payload=payload, command_id=command_id or _new_id())
        (verdict,) = await self.send_many([command])
        if verdict.outcome in ("failed", "invalid"):
            raise CommandRefused(f"The command was refused: {verdict.reason}. {verdict.detail or ''}".strip(), verdict)
        return verdict

    async def send_many(self, commands: Iterable[Command]) -> list[CommandVerdict]:
        """Returns a verdict for each command, in order. Retries transient failures while `patience` lasts."""
        waiting = list(commands)
        verdicts: dict[int, CommandVerdict] = {}
        deadline = self._now() + self._patience
        open_places = list(range(len(waiting)))
        while open_places:
            for start in range(0, len(open_places), BATCH):
                places = open_places[start : start + BATCH]
                sent = await self._send([waiting[place] for place in places])
                verdicts |= dict(zip(places, sent, strict=True))
            open_places = [place for place in open_places if _again(verdicts[place])]
            if open_places:
                wait = max(_hint(verdicts[place]) for place in open_places)
                if self._now() + wait > deadline:
                    break
                await self._pause(wait)
        return [verdicts[place] for place in range(len(waiting))]

    async def _send(self, commands: Sequence[Command]) -> list[CommandVerdict]:
        """Sends one request, and a second one for commands whose signing key was outdated."""
        config = await self.config()
        verdicts = await self._post(commands, config)
        stale = [place for place, verdict in enumerate(verdicts) if verdict.reason in _STALE_KEY]
        if not stale:
            return verdicts
        newer = await self.config(newer_than=config)
        if newer.active.version_id == config.active.version_id:
            return verdicts
        again = await self._post([commands[place] for place in stale], newer)
        for place, verdict in zip(stale, again, strict=True):
            verdicts[place] = verdict
        return verdicts

    async def _post(self, commands: Sequence[Command], config: TenantConfig) -> list[CommandVerdict]:
        messages = [Raw(self._signed(command, config)) for command in commands]
        reply = await self._caller.call("POST", "/v1/commands", _verdicts, {"commands": messages})
        return list(reply.results)

    def _signed(self, command: Command, config: TenantConfig) -> bytes:
        payload = command.payload if isinstance(command.payload, Raw) else _json.encode(command.payload)
        moment = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        try:
            return compose(
                bytes.fromhex(config.active.secret),
                command_id=command.command_id,
                timestamp=moment.replace("+00:00", "Z"),
                version_id=config.active.version_id,
                target=command.target,
                name=command.name,
                payload=bytes(payload),
            )
        except NotCanonical as error:
            raise BadRequest(f"The payload cannot be signed: {error}.", code="not_canonical") from None

    async def config(self, *, newer_than: TenantConfig | None = None) -> TenantConfig:
        """Returns the service's keys, and refreshes them when the poll interval has passed."""
        async with self._polling:
            known = self._known
            if known is not None and known is not newer_than and self._now() < self._poll_at:
                return known
            try:
                fresh = await self._caller.call("GET", "/v1/tenant-config", _config)
            except (ServerUnreachable, Unavailable):
                # The cached keys are valid for days: use them. If they are not, sending fails with a reason.
                if known is None or newer_than is not None:
                    raise
                self._poll_at = self._now() + _LONGEST_WAIT_SECONDS
                return known
            self._known, self._poll_at = fresh, self._now() + fresh.poll_seconds
            return fresh


def _again(verdict: CommandVerdict) -> bool:
    return verdict.outcome == "failed" and verdict.reason in _PASSING


def _hint(verdict: CommandVerdict) -> float:
    if verdict.retry_after_ms is None:
        return _UNHINTED_SECONDS
    return min(verdict.retry_after_ms / 1000, _LONGEST_WAIT_SECONDS)
