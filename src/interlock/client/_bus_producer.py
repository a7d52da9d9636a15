"""Sending commands: signed with the newest key of the service, in batches, and again when the bus says when.

A command keeps its id however often it is sent, so that a route with strict deduplication takes it once. Each time it
gets a fresh timestamp and signature: a message is good for a minute, and a key for a while.
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

from interlock.bus.canonical import NotCanonical
from interlock.bus.envelope import compose
from interlock.client._caller import Caller, bearer
from interlock.errors import BadRequest, CommandRefused, ServerUnreachable, Unavailable
from interlock.wire import CommandVerdict, CommandVerdicts, TenantConfig

BATCH: Final = 100
_PATIENCE_SECONDS: Final = 20.0
"""Of one request, with the message that was signed for it: less than the window in which that is good."""
_LONGEST_WAIT_SECONDS: Final = 60.0
_UNHINTED_SECONDS: Final = 1.0
_STALE_KEY: Final = frozenset({"unknown_key", "expired_key", "invalid_hmac"})
_PASSING: Final = frozenset({"rate-limit-exceeded", "fairness-violation", "delivery-failure"})
"""Failures that another time may not have."""

_config = msgspec.json.Decoder(TenantConfig)
_verdicts = msgspec.json.Decoder(CommandVerdicts)
_json = msgspec.json.Encoder()


def _new_id() -> str:
    return str(uuid4())


class Command(Struct, frozen=True, kw_only=True):
    """What is to be done, by whom. The same `command_id` is the same command."""

    target: str
    name: str
    payload: Any = None
    """Anything JSON can say; `msgspec.Raw` as it is."""
    command_id: str = msgspec.field(default_factory=_new_id)


class Producer:
    """Sends commands as the service that the API key speaks for. One for all tasks of a process."""

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
        """`patience`: how many seconds a command is tried again that was refused for the moment."""
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
        """One command. Unless it was delivered, handed on, or is a duplicate: CommandRefused, with the verdict."""
        command = Command(target=target, name=name, payload=payload, command_id=command_id or _new_id())
        (verdict,) = await self.send_many([command])
        if verdict.outcome in ("failed", "invalid"):
            raise CommandRefused(f"The command was refused: {verdict.reason}. {verdict.detail or ''}".strip(), verdict)
        return verdict

    async def send_many(self, commands: Iterable[Command]) -> list[CommandVerdict]:
        """A verdict for each, in their order. What was refused for the moment is sent again while patience lasts."""
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
        """One request; a second one where the key was not the right one any more."""
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
        """What is known of the service's keys, asked for again when it is time to."""
        async with self._polling:
            known = self._known
            if known is not None and known is not newer_than and self._now() < self._poll_at:
                return known
            try:
                fresh = await self._caller.call("GET", "/v1/tenant-config", _config)
            except (ServerUnreachable, Unavailable):
                # The keys that are known are good for days yet: sending is tried, and says if it is otherwise.
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
