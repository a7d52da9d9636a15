"""JSON-RPC over HTTP with batches, which endpoints may answer in any order, partially, late or not at all.

The caller always gets one answer per call, or an error with a message on what to do. A batch that is refused or too
slow is halved; the size grows again after a number of successful batches.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct

from interlock.outbound.exchange import Bounds, KeptSender, Reply, Request
from interlock.outbound.guard import BadReply, OutboundFailed, ReplyTooLarge, TlsFailed, TooSlow, Unreachable
from interlock.workers.context import TaskFailed

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 15.0
GROW_AFTER: Final = 20
"""Successful batches in a row before a larger one is tried."""

_NO_SUCH_METHOD: Final = -32601
_TOO_LARGE: Final = frozenset({400, 413})
_NOT_HERE: Final = frozenset({401, 402, 403, 404, 405, 410})
_SHOWN: Final = 200
REPLY_BYTES: Final = 64 << 20
"""Limit of one reply, both as sent and decompressed. A batch whose reply is larger is halved."""


class RpcFailed(TaskFailed):
    """The endpoint is unusable, permanently or for now."""


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    params: list[Any]
    divisible: bool = False
    """The caller can split the call, so a refusal is returned to it without a retry."""


class Refused(Struct, frozen=True):
    """An error that the endpoint returned instead of a result."""

    code: int
    message: str


class _Error(Struct):
    code: int = 0
    message: str = ""


class _Answer(Struct):
    id: int | str | None = None
    result: Raw = Raw()
    error: _Error | None = None


_answers = msgspec.json.Decoder(list[_Answer])
_answer = msgspec.json.Decoder(_Answer)
_encode = msgspec.json.Encoder().encode


@dataclass
class _Trouble(Exception):
    """A failure that is worth a retry."""

    reason: str
    smaller: bool = False
    """Retry with a smaller batch."""
    at_once: bool = False
    """Retry without a pause."""
    after: float = 0.0
    """Seconds to wait, as requested by the endpoint."""
    garbage: bool = False
    """The answer is not JSON-RPC."""


class Endpoint:
    """A JSON-RPC endpoint. `asked` is the template of all requests, and `sender` decides which servers are allowed.

    `on_trouble` is called with the reason of a pause, and with None when requests succeed again.
    """

    def __init__(
        self,
        asked: Request,
        sender: KeptSender,
        *,
        timeout: float,
        patience: float,
        most_calls: int,
        on_trouble: Callable[[str | None], None] = lambda _: None,
        chance: random.Random | None = None,
    ) -> None:
        self.host = urlsplit(asked.url).hostname or ""
        """The part of the URL that may be shown: paths of RPC endpoints often contain a key."""
        self._sender = sender
        headers = {"accept": "application/json"} | dict(asked.headers) | {"content-type": "application/json"}
        self._asked = replace(asked, method="POST", headers=headers)
        self._bounds = Bounds(timeout, REPLY_BYTES)
        self._patience = patience
        self._ceiling = self._most_calls = most_calls
        self._went_well = 0
        self.on_trouble = on_trouble
        self._chance = chance or random.Random()  # noqa: S311 - jitter, not a secret
        self._ids = itertools.count(1)

    async def close(self) -> None:
        await self._sender.close()

    async def ask(self, calls: Sequence[Call], *, trusting: bool = True) -> list[Raw | Refused]:
        """Returns one answer per call, in order. Without `trusting`, an answer that is not JSON-RPC is not retried."""
        answers: list[Raw | Refused | None] = [None] * len(calls)
        since, pauses = time.monotonic(), 0
        while missing := [index for index, answer in enumerate(answers) if answer is None]:
            try:
                await self._ask_some(calls, missing[: self._most_calls], answers)
            except _Trouble as trouble:
                if trouble.garbage and not trusting:
                    raise self._failed(trouble.reason, "NotAnRpcEndpoint") from None
                if not trouble.at_once:
                    await self._pause(trouble, since, pauses)
                    pauses += 1
            else:
                since, pauses = time.monotonic(), 0
        self.on_trouble(None)
        return [answer for answer in answers if answer is not None]

    async def _pause(self, trouble: _Trouble, since: float, pauses: int) -> None:
        if time.monotonic() - since >= self._patience:
            raise self._failed(trouble.reason, "RpcUnavailable")
        self.on_trouble(f"{self.host}: {trouble.reason}")
        longest = min(FIRST_PAUSE_SECONDS * 2**pauses, LONGEST_PAUSE_SECONDS)
        left = max(self._patience - (time.monotonic() - since), 0.0)
        await asyncio.sleep(min(max(trouble.after, longest * self._chance.uniform(0.5, 1.0)), left))

    def _failed(self, reason: str, error_class: str) -> RpcFailed:
        return RpcFailed(f"The RPC endpoint at {self.host} cannot be used: {reason}", error_class)

    async def _ask_some(self, calls: Sequence[Call], indexes: list[int], into: list[Raw | Refused | None]) -> None:
        ids = {next(self._ids): index for index in indexes}
        documents = [_document(number, calls[index]) for number, index in ids.items()]
        try:
            answers = await self._exchange(documents)
        except _Trouble as trouble:
            if trouble.smaller:
                self._shrink(len(indexes))
            raise
        found = {ids[number]: answer for answer in answers if (number := _number(answer.id)) in ids}
        troubles = [self._take(calls[index], answer, index, into) for index, answer in found.items()]
        reasons = [trouble for trouble in troubles if trouble is not None]
        if len(reasons) == len(found):
            raise _Trouble(reasons[0] if reasons else "its answers have other ids than the calls", garbage=not reasons)
        self._grow(len(indexes))

    def _take(self, call: Call, answer: _Answer, index: int, into: list[Raw | Refused | None]) -> str | None:
        """Stores the answer at its index. Returns a reason if it is not usable."""
        if answer.error is None:
            if not bytes(answer.result):
                return f"{call.method} returned neither a result nor an error"
            into[index] = answer.result
            return None
        message = answer.error.message[:_SHOWN]
        if answer.error.code == _NO_SUCH_METHOD:
            raise self._failed(f"it does not support {call.method} ({message})", "RpcMethodMissing")
        if call.divisible:
            into[index] = Refused(answer.error.code, message)
            return None
        return f"{call.method} failed with error {answer.error.code} ({message})"

    async def _exchange(self, documents: list[dict[str, Any]]) -> list[_Answer]:
        single = len(documents) == 1
        body = _encode(documents[0] if single else documents)
        try:
            reply = await self._sender.send(replace(self._asked, body=body), self._bounds)
        except OutboundFailed as error:
            raise self._failure(error, single=single) from None
        self._check_status(reply, single=single)
        return _decoded(reply.body, single=single)

    def _failure(self, error: OutboundFailed, *, single: bool) -> Exception:
        if isinstance(error, ReplyTooLarge) and not single:
            return _Trouble(str(error), smaller=True, at_once=True)
        if not error.retryable:
            return self._failed(str(error), type(error).__name__)
        if isinstance(error, TlsFailed) and error.untrusted:
            return self._failed(str(error), "RpcUnavailable")
        # An overloaded endpoint often stays silent, or closes the connection in the middle of an answer.
        broke_off = isinstance(error, TooSlow | BadReply) or (isinstance(error, Unreachable) and error.broke_off)
        return _Trouble(str(error), smaller=broke_off and not single)

    def _check_status(self, reply: Reply, *, single: bool) -> None:
        if reply.status in _TOO_LARGE and not single:
            raise _Trouble(f"it answered a batch with status {reply.status}", smaller=True, at_once=True)
        if reply.status in _NOT_HERE:
            raise self._failed(
                f"it answered with status {reply.status}. Check rpc_url, and the key in it or in headers.",
                "NotAnRpcEndpoint",
            )
        if reply.status != 200:
            wait = reply.headers.get("retry-after", "").strip()
            after = min(float(wait), 60.0) if wait.isdigit() else 0.0
            raise _Trouble(f"it answered with status {reply.status}", after=after)

    def _shrink(self, asked: int) -> None:
        self._most_calls, self._went_well = max(1, asked // 2), 0

    def _grow(self, asked: int) -> None:
        if asked < self._most_calls or self._most_calls == self._ceiling:
            return
        self._went_well += 1
        if self._went_well >= GROW_AFTER:
            self._most_calls, self._went_well = min(self._most_calls * 2, self._ceiling), 0


def _document(number: int, call: Call) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": call.method, "params": call.params}


def _number(id_: int | str | None) -> int | None:
    """Returns the id as a number. Some servers return it as text."""
    return int(id_) if isinstance(id_, str) and id_.isdecimal() else id_ if isinstance(id_, int) else None


def _decoded(body: bytes, *, single: bool) -> list[_Answer]:
    try:
        if single:
            return [_answer.decode(body)]
        if body.lstrip()[:1] == b"{" and (refusal := _answer.decode(body)).error is not None:
            raise _Trouble(f"it refused a batch ({refusal.error.message[:_SHOWN]})", smaller=True, at_once=True)
        return _answers.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise _Trouble("its answer is not JSON-RPC", garbage=True) from None
