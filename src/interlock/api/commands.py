"""Commands: one, or a batch in which each is answered by itself."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from litestar import Request, post
from litestar.datastructures import State
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, RequestBody, Schema
from litestar.params import RawBody
from msgspec import UNSET, Raw, Struct, UnsetType

from interlock.access.principals import SEND, Principal
from interlock.api.auth import Headers, kernel_of, principal_of, user_guard, user_of
from interlock.api.decoding import decode, require_json
from interlock.api.express import Express
from interlock.api.problems import WITH_A_BODY
from interlock.bus import telling
from interlock.bus.decision import Decision, Outcome
from interlock.errors import BadRequest, Forbidden, TooLarge
from interlock.strict_json import NotStrict, require_unique_keys
from interlock.wire.bus_commands import CommandVerdict, CommandVerdicts
from interlock.wiring import Kernel

Http = Request[Any, Any, State]
PATH: Final = "/v1/commands"
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


class _Sent(Struct, forbid_unknown_fields=True):
    """Either a message, which is read where it is judged, or several."""

    metadata: Raw | UnsetType = UNSET
    command: Raw | UnsetType = UNSET
    commands: list[Raw] | UnsetType = UNSET


_text: Final = Schema(type=OpenAPIType.STRING)
_message: Final = Schema(
    type=OpenAPIType.OBJECT,
    description="A signed command; docs/bus.md says how it is signed.",
    required=["metadata", "command"],
    additional_properties=False,
    properties={
        "metadata": Schema(
            type=OpenAPIType.OBJECT,
            properties=dict.fromkeys(("id", "timestamp", "type", "version_id", "hmac"), _text),
        ),
        "command": Schema(
            type=OpenAPIType.OBJECT,
            properties={"target": _text, "name": _text, "payload": Schema(description="Any JSON.")},
        ),
    },
)
_batch: Final = Schema(
    type=OpenAPIType.OBJECT,
    required=["commands"],
    additional_properties=False,
    properties={"commands": Schema(type=OpenAPIType.ARRAY, items=_message)},
)


@dataclass
class _Commands(Operation):
    """A message is signed as it stands, and judged as it came: so the body is no parameter, and described here."""

    def __post_init__(self) -> None:
        content = {"application/json": OpenAPIMediaType(schema=Schema(one_of=[_message, _batch]))}
        self.request_body = RequestBody(content=content, required=True)


@post(
    PATH,
    guards=[user_guard],
    opt={"scope": SEND, "warm": True},
    status_code=202,
    operation_class=_Commands,
    responses=WITH_A_BODY,
    summary="Send a signed command, or a batch of them",
    description="Answered 202 with a verdict for each, as far as it is known: `escalated` ones are decided later, and "
    "telemetry tells. Whatever was answered is durable.",
)
async def send_commands(request: Http, body: RawBody) -> CommandVerdict | CommandVerdicts:
    require_json(request.headers.getall("content-type", []))
    return await _accept(kernel_of(request), principal_of(request), body)


async def _answer(
    kernel: Kernel, headers: Headers, body: Callable[[], Awaitable[bytes]]
) -> CommandVerdict | CommandVerdicts:
    principal = await user_of(kernel, headers, scope=SEND, warm=True)
    require_json(headers("content-type"))
    return await _accept(kernel, principal, await body())


EXPRESS: Final = Express("POST", PATH, 202, _answer)
"""The same, for the path as everybody writes it."""


async def _accept(kernel: Kernel, principal: Principal, body: bytes) -> CommandVerdict | CommandVerdicts:
    if principal.service is None:
        raise Forbidden(
            "This key speaks for no service, so that nothing can be sent with it. Make one that does: "
            "interlock users create --service NAME.",
            code="no_service",
        )
    single, messages = _messages(body, most=kernel.settings.command_batch_limit)
    source = f"{principal.org}/{principal.service}"

    def answer(decisions: list[Decision]) -> CommandVerdict | CommandVerdicts:
        now = kernel.clock.now()
        verdicts = [_verdict(decision, now) for decision in decisions]
        return verdicts[0] if single else CommandVerdicts(results=verdicts)

    return await kernel.ingress.accept(principal.org_id, source, messages, answer)


def _messages(body: bytes, *, most: int) -> tuple[bool, Sequence[Raw | bytes]]:
    """Whether one command was sent by itself, and the commands as they came."""
    if body.count(b'"commands"') > 1:
        _require_one_batch(body)
    try:
        return _split(body, most=most)
    except BadRequest:
        # msgspec refuses a whole batch for half of a surrogate pair in one command. Without any surrogates, in a text
        # of the same length, it finds where each command is.
        harmless = _SURROGATE.sub(rb"\\u0000", body)
        if harmless == body:
            raise
        single, found = _split(harmless, most=most)
    return single, _slices(body, harmless, found)


def _require_one_batch(body: bytes) -> None:
    """Each command is judged by itself, whatever it repeats; the batch may not be there twice."""
    try:
        require_unique_keys(body, top_only=True)
    except NotStrict as error:
        raise BadRequest(f"The request body is not valid: {error}.", code="invalid_request") from None


def _slices(body: bytes, harmless: bytes, found: Sequence[Raw]) -> list[bytes]:
    """Returns what is in `body` where these are in `harmless`, in order."""
    slices, at = [], 0
    for raw in found:
        start = harmless.index(bytes(raw), at)
        at = start + len(raw)
        slices.append(body[start:at])
    return slices


def _split(body: bytes, *, most: int) -> tuple[bool, Sequence[Raw]]:
    sent: _Sent = decode(body, _Sent, repeated_keys=True)
    if isinstance(sent.commands, UnsetType):
        if isinstance(sent.metadata, UnsetType) and isinstance(sent.command, UnsetType):
            raise BadRequest(
                'Send one command, {"metadata": …, "command": …}, or several, {"commands": […]}.',
                code="invalid_request",
            )
        return True, [Raw(body)]
    if not (isinstance(sent.metadata, UnsetType) and isinstance(sent.command, UnsetType)):
        raise BadRequest("Send either one command or `commands`, not both.", code="invalid_request")
    if not sent.commands:
        raise BadRequest("`commands` is empty; send at least one.", code="invalid_request")
    if len(sent.commands) > most:
        raise TooLarge(f"The batch has {len(sent.commands)} commands; it may have {most}.", code="batch_too_large")
    return False, sent.commands


def _verdict(decision: Decision, now: datetime) -> CommandVerdict:
    command_id = None if decision.envelope is None else decision.envelope.metadata.id
    if decision.outcome is Outcome.DELIVERED:
        return CommandVerdict(command_id=command_id, outcome="delivered")
    hinted = decision.wait_seconds is not None
    return CommandVerdict(
        command_id=command_id,
        outcome=decision.outcome.value,
        reason=decision.reason or None,
        detail=decision.detail or None,
        retry_after_ms=telling.retry_after_ms(decision) if hinted else None,
        throttle_until=telling.throttle_until(decision, now) if hinted else None,
    )


HANDLERS = [send_commands]
