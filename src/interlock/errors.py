"""Every error Interlock raises on purpose.

    InterlockError
    ├── BadRequest 400        malformed input; says what to write instead
    │   ├── UnstorableText    text that PostgreSQL cannot hold
    │   ├── InvalidDag        a DAG with problems; carries them all, each with its line and column
    │   ├── InvalidWhere      a `where` outside its language; knows the position
    │   └── InvalidQuery      a statement that says more than one SELECT over what is granted, or that DuckDB refuses
    ├── Unauthenticated 401   no credential, or one that does not verify
    ├── Forbidden 403         a good credential that does not reach this far
    ├── NotFound 404
    ├── MethodNotAllowed 405  carries Allow
    ├── RequestTimeout 408    the client did not send its request in time
    ├── Conflict 409
    │   └── Fenced 409        a stale attempt or lease; says which part is stale
    ├── PreconditionFailed 412
    ├── TooLarge 413
    │   └── QueryTooLarge     a statement past its time, memory, temp space or reply; its code says which
    ├── UnsupportedMediaType 415
    ├── RangeNotSatisfiable 416  carries Content-Range
    ├── TooManyRequests 429   carries Retry-After
    ├── HeadersTooLarge 431
    ├── Unavailable 503       a store is away; retrying is right
    ├── QueryCrashed 500      the process of a statement died; nothing else was touched
    ├── ConfigurationError    a setting that stops the start
    ├── CommandRefused        the client's view of a command that was not taken; carries the verdict
    └── ServerUnreachable     the client's view of a server that does not answer

Each knows its HTTP status and a stable `code`; nothing else in the project builds a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol


class InterlockError(Exception):
    """Base class: `detail` is one sentence for a person, `code` is for programs."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    default_code: ClassVar[str] = "internal"

    def __init__(self, detail: str, *, code: str | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.default_code
        self.extra = extra
        """Further members of the problem document, such as `stale` or `line`."""

    @property
    def headers(self) -> dict[str, str]:
        return {}


class BadRequest(InterlockError):
    status = 400
    title = "Bad request"
    default_code = "bad_request"


class UnstorableText(BadRequest):
    """Raised for text that PostgreSQL cannot hold, such as one with a NUL."""


class FileProblem(Protocol):
    """What is wrong with a file, where, and what to write instead."""

    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def instead(self) -> str: ...


class InvalidDag(BadRequest):
    """A definition that must not be deployed. `problems` has everything that is wrong with it."""

    default_code = "invalid_dag"

    def __init__(self, problems: Sequence[FileProblem]) -> None:
        listed = [{"line": p.line, "column": p.column, "message": p.what, "suggestion": p.instead} for p in problems]
        super().__init__("\n".join(map(str, problems)), problems=listed)
        self.problems = problems


class InvalidWhere(BadRequest):
    """`position` counts characters from 1."""

    def __init__(self, detail: str, *, position: int) -> None:
        super().__init__(detail, position=position)
        self.position = position


class InvalidQuery(BadRequest):
    """Says what is wrong with the statement, and never repeats it."""

    default_code = "invalid_query"


class Unauthenticated(InterlockError):
    status = 401
    title = "Not authenticated"
    default_code = "unauthenticated"


class Forbidden(InterlockError):
    status = 403
    title = "Not allowed"
    default_code = "forbidden"


class NotFound(InterlockError):
    status = 404
    title = "Not found"
    default_code = "not_found"


class MethodNotAllowed(InterlockError):
    status = 405
    title = "Method not allowed"
    default_code = "method_not_allowed"

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self.extra.get("allow", "")}


class RequestTimeout(InterlockError):
    status = 408
    title = "Request timeout"
    default_code = "request_timeout"


class Conflict(InterlockError):
    status = 409
    title = "Conflict"
    default_code = "conflict"


class Fenced(Conflict):
    """A write of an attempt that no longer holds the task. `stale` names the part that is old."""

    title = "Fenced off"
    default_code = "fenced"

    def __init__(self, detail: str, *, stale: str) -> None:
        super().__init__(detail, stale=stale)
        self.stale = stale


class PreconditionFailed(InterlockError):
    """What the request made a condition of does not hold."""

    status = 412
    title = "Precondition failed"
    default_code = "precondition_failed"


class TooLarge(InterlockError):
    status = 413
    title = "Too large"
    default_code = "too_large"


class QueryTooLarge(TooLarge):
    """A statement that met one of its limits."""

    default_code = "query_too_large"


class UnsupportedMediaType(InterlockError):
    status = 415
    title = "Unsupported media type"
    default_code = "unsupported_media_type"


class RangeNotSatisfiable(InterlockError):
    """A range that begins behind the end, at `size`."""

    status = 416
    title = "Range not satisfiable"
    default_code = "range_not_satisfiable"

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Range": f"bytes */{self.extra['size']}"} if "size" in self.extra else {}


class TooManyRequests(InterlockError):
    status = 429
    title = "Too many requests"
    default_code = "too_many_requests"

    def __init__(self, detail: str, *, retry_after: float, code: str | None = None) -> None:
        super().__init__(detail, code=code, retry_after_ms=int(retry_after * 1000))
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(max(1, round(self.retry_after)))}


class HeadersTooLarge(InterlockError):
    status = 431
    title = "Headers too large"
    default_code = "headers_too_large"


class Unavailable(InterlockError):
    status = 503
    title = "Unavailable"
    default_code = "unavailable"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "1"}


class QueryCrashed(InterlockError):
    default_code = "query_crashed"


class ConfigurationError(InterlockError):
    default_code = "configuration"


class ServerUnreachable(InterlockError):
    default_code = "unreachable"


class CommandRefused(InterlockError):
    default_code = "command_refused"

    def __init__(self, detail: str, verdict: Any) -> None:
        super().__init__(detail)
        self.verdict = verdict
        """Any: it is a body of the wire, which knows nothing of errors, nor they of it."""


HTTP_ERRORS: tuple[type[InterlockError], ...] = (
    BadRequest,
    Unauthenticated,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    Conflict,
    PreconditionFailed,
    TooLarge,
    UnsupportedMediaType,
    RangeNotSatisfiable,
    TooManyRequests,
    HeadersTooLarge,
    Unavailable,
)
"""What a server may answer, by status: the client turns a problem document back into one of these."""
