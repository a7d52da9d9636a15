"""The error hierarchy of Interlock.

    InterlockError
    ├── BadRequest 400        malformed input; the detail says how to correct it
    │   ├── UnstorableText    text that PostgreSQL cannot store
    │   ├── InvalidDag        an invalid DAG; lists all problems, each with its line and column
    │   ├── InvalidWhere      a `where` clause outside the supported language; carries the position
    │   └── InvalidQuery      a statement other than one SELECT on granted tables, or one that DuckDB rejects
    ├── Unauthenticated 401   credentials that are missing or invalid
    ├── Forbidden 403         valid credentials without the required permission
    ├── NotFound 404
    ├── MethodNotAllowed 405  carries Allow
    ├── RequestTimeout 408    the client did not send its request in time
    ├── Conflict 409
    │   └── Fenced 409        a stale attempt or lease; names the stale part
    ├── PreconditionFailed 412
    ├── TooLarge 413
    │   └── QueryTooLarge     a statement over its time, memory, disk or result limit; the code names the limit
    ├── UnsupportedMediaType 415
    ├── RangeNotSatisfiable 416  carries Content-Range
    ├── TooManyRequests 429   carries Retry-After
    ├── HeadersTooLarge 431
    ├── Unavailable 503       a store is unavailable; the caller should retry
    ├── QueryCrashed 500      the child process of a statement died; other statements are unaffected
    ├── ConfigurationError    an invalid setting that prevents the start
    ├── CommandRefused        raised by the client when the bus rejects a command; carries the verdict
    ├── CommandPending        raised by the client when the bus has not decided about a command in time
    └── ServerUnreachable     raised by the client when the server does not respond

Each class defines its HTTP status and a stable `code`; no other module chooses a status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol


class InterlockError(Exception):
    """Base class. `detail` is a sentence for people, `code` is for programs."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    default_code: ClassVar[str] = "internal"

    def __init__(self, detail: str, *, code: str | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.default_code
        self.extra = extra
        """Further members of the problem document, for example `stale` or `line`."""

    @property
    def headers(self) -> dict[str, str]:
        return {}


class BadRequest(InterlockError):
    status = 400
    title = "Bad request"
    default_code = "bad_request"


class UnstorableText(BadRequest):
    """Raised for text that PostgreSQL cannot store, for example because it contains a NUL character."""


class FileProblem(Protocol):
    """A problem in a file: its position, a message, and a suggested correction."""

    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def instead(self) -> str: ...


class InvalidDag(BadRequest):
    """Raised for a DAG that must not be deployed. `problems` lists everything that is wrong with it."""

    default_code = "invalid_dag"

    def __init__(self, problems: Sequence[FileProblem]) -> None:
        listed = [{"line": p.line, "column": p.column, "message": p.what, "suggestion": p.instead} for p in problems]
        super().__init__("\n".join(map(str, problems)), problems=listed)
        self.problems = problems


class InvalidWhere(BadRequest):
    """Raised for an invalid `where` clause. `position` is the 1-based character offset."""

    def __init__(self, detail: str, *, position: int) -> None:
        super().__init__(detail, position=position)
        self.position = position


class InvalidQuery(BadRequest):
    """Raised for an invalid statement. The detail never repeats the statement."""

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
    """Raised for a write by an attempt that no longer holds the task. `stale` names the outdated part of the fence."""

    title = "Fenced off"
    default_code = "fenced"

    def __init__(self, detail: str, *, stale: str) -> None:
        super().__init__(detail, stale=stale)
        self.stale = stale


class PreconditionFailed(InterlockError):
    """Raised when a precondition of the request, such as `If-Match`, does not hold."""

    status = 412
    title = "Precondition failed"
    default_code = "precondition_failed"


class TooLarge(InterlockError):
    status = 413
    title = "Too large"
    default_code = "too_large"


class QueryTooLarge(TooLarge):
    """Raised when a statement exceeds one of its limits."""

    default_code = "query_too_large"


class UnsupportedMediaType(InterlockError):
    status = 415
    title = "Unsupported media type"
    default_code = "unsupported_media_type"


class RangeNotSatisfiable(InterlockError):
    """Raised for a range that starts at or after the end of the object, which has `size` bytes."""

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
        """Typed as Any so that this module does not depend on the wire types."""


class CommandPending(InterlockError):
    """Raised when the fate of a command is still unknown. The command is durable, and may be delivered later."""

    default_code = "command_pending"

    def __init__(self, detail: str, verdict: Any) -> None:
        super().__init__(detail)
        self.verdict = verdict
        """As in CommandRefused."""


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
"""The errors a server may return. The client maps the status of a problem document to one of these."""
