"""Errors as application/problem+json, whatever raised them."""

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
from interlock.wire import Problem

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
"""What every endpoint may answer besides its own reply."""

WITH_A_BODY = {415: documented(415)}
"""And what those may answer that take a body."""


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
    )
    return msgspec.json.encode(problem)


def problem_response(request: Request[Any, Any, Any], error: InterlockError) -> Response[bytes]:
    document = problem_document(error, str(request.scope.get("interlock.request_id", "")))
    return Response(document, status_code=error.status, media_type=PROBLEM_JSON, headers=error.headers)


def refusal(error: Exception) -> InterlockError:
    """What a caller is told of an error. What is not the caller's fault is logged."""
    if not isinstance(error, InterlockError):
        log.error("request.failed", error=type(error).__name__, exc_info=error)
        return InterlockError("Something went wrong here; the log has the request id.")
    if error.status >= 500:
        log.warning("request.unavailable", code=error.code, reason=error.detail)
    return error


def too_large() -> TooLarge:
    return TooLarge("The request body is too large; the limit is the setting body_limit_bytes.")


def ended_too_soon() -> BadRequest:
    """Nobody is there to read it; but it is no defect, and must not look like one in log and metrics."""
    return BadRequest("The connection ended before the request did.")


def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return problem_response(request, refusal(error))


def on_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """What Litestar itself refuses: unknown paths, wrong methods, bodies that do not decode."""
    if isinstance(error, ValidationException):
        return problem_response(request, _validation(error))
    if error.detail == _GONE:
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


_GONE = "client disconnected prematurely"
"""What Litestar says of a body that ends too soon, as if it were an error of the server."""

_DETAILS = {
    404: "There is nothing at this path on this listener; see /openapi.json.",
    405: "This path does not take that method; see /openapi.json.",
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
