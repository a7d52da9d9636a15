"""Returns all errors as application/problem+json."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec

from interlock.errors import (
    BadRequest,
    Forbidden,
    InterlockError,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    Unauthenticated,
)
from interlock.wire.base import Problem

log = structlog.get_logger()

PROBLEM_JSON = "application/problem+json"

_BY_STATUS: dict[int, type[InterlockError]] = {
    e.status: e for e in (BadRequest, Unauthenticated, Forbidden, NotFound, MethodNotAllowed, TooLarge)
}


def documented(status: int) -> ResponseSpec:
    return ResponseSpec(
        data_container=Problem,
        description=HTTPStatus(status).phrase,
        generate_examples=False,
        media_type=PROBLEM_JSON,
    )


DOCUMENTED = {status: documented(status) for status in (400, 401, 403, 404, 405, 409, 413, 429, 431, 503)}
"""Errors that every endpoint may return."""

WITH_A_BODY = {415: documented(415)}
"""Further errors of endpoints with a request body."""


def problem_document(error: InterlockError, request_id: str) -> bytes:
    problem = Problem(
        type=f"urn:interlock:problem:{error.code}",
        title=error.title,
        status=error.status,
        detail=error.detail,
        code=error.code,
        request_id=request_id,
        stale=error.extra.get("stale"),
        retry_after_ms=error.extra.get("retry_after_ms"),
        errors=error.extra.get("errors"),
        problems=error.extra.get("problems"),
        candidates=error.extra.get("candidates"),
    )
    return msgspec.json.encode(problem)


def problem_response(request: Request[Any, Any, Any], error: InterlockError) -> Response[bytes]:
    document = problem_document(error, str(request.scope.get("interlock.request_id", "")))
    return Response(document, status_code=error.status, media_type=PROBLEM_JSON, headers=error.headers)


def refusal(error: Exception) -> InterlockError:
    """Returns the error that the caller sees. Logs errors that the caller did not cause."""
    if not isinstance(error, InterlockError):
        log.error("request.failed", error=type(error).__name__, exc_info=error)
        return InterlockError("Internal error; search the log for the request id.")
    if error.status >= 500:
        log.warning("request.unavailable", code=error.code, reason=error.detail)
    return error


def too_large() -> TooLarge:
    return TooLarge("The request body is too large; the setting body_limit_bytes is the limit.")


def ended_too_soon() -> BadRequest:
    """Returns an error that nobody reads. It keeps a disconnect from looking like a defect in logs and metrics."""
    return BadRequest("The connection closed before the request was complete.")


def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return problem_response(request, refusal(error))


def on_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Converts errors of Litestar itself: unknown paths, wrong methods, invalid bodies."""
    if isinstance(error, ValidationException):
        return problem_response(request, _validation(error))
    if error.detail == _DISCONNECTED:
        return problem_response(request, ended_too_soon())
    kind = _BY_STATUS.get(error.status_code)
    if kind is None:
        return (
            on_error(request, error)
            if error.status_code >= 500
            else problem_response(request, BadRequest(error.detail))
        )
    allow = (error.headers or {}).get("allow", "")
    return problem_response(request, kind(_DETAILS.get(error.status_code, error.detail), allow=allow))


_DISCONNECTED = "client disconnected prematurely"
"""Litestar's message for a truncated body, which it reports as a server error."""

_DETAILS = {
    404: "This path does not exist on this listener; see /openapi.json.",
    405: "This path does not support the method; see /openapi.json.",
    413: too_large().detail,
}


def _validation(error: ValidationException) -> BadRequest:
    extra = error.extra if isinstance(error.extra, list) else []
    if any(item.get("key") == "data" for item in extra):
        return BadRequest("The request has no body; send JSON.", code="invalid_request")
    errors = [
        f"{item['key']}: {item['message']}" if item.get("key") else str(item.get("message", "")) for item in extra
    ]
    return BadRequest(
        f"The request is not valid: {errors[0] if errors else error.detail}.",
        code="invalid_request",
        errors=errors or None,
    )


HANDLERS: dict[Any, Any] = {
    InterlockError: on_error,
    HTTPException: on_http_exception,
    Exception: on_error,
}
