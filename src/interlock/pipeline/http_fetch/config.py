"""What the job's config says, checked before anything is asked of anybody."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.pipeline.failures import BadConfig
from interlock.pipeline.follower.config import Seconds, filled
from interlock.pipeline.http_fetch.template import check

Status = Annotated[int, Meta(ge=100, le=599)]

_OURS: Final = frozenset(
    {"accept-encoding", "connection", "content-length", "expect", "host", "keep-alive", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Headers that say how the exchange goes, which is not the job's to say."""


class FetchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, str] = {}
    """Sent with every request. `${NAME}` stands for a variable of the worker's environment."""
    body: Any = None
    """A JSON value, in whose strings `{{field}}` stands for a field of the payload; or such a value written as text."""
    timeout_seconds: Seconds = 30.0
    """For one request with all its redirects."""
    max_bytes: Annotated[int, Meta(ge=1, le=64 << 20)] = 1 << 20
    """A larger reply fails the task."""
    follow_redirects: Annotated[int, Meta(ge=0, le=20)] = 5
    keep_body: Literal["inline", "required", "none"] = "inline"
    """inline: with the result, if it fits. required: a body that does not fit fails the task."""
    accept: Annotated[tuple[Status, ...], Meta(max_length=100)] = ()
    """Statuses from 400 on that are results and no failures."""
    retry: Annotated[tuple[Status, ...], Meta(max_length=100)] = (408, 425, 429, 500, 502, 503, 504)
    """Statuses after which it is worth asking again."""
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    """How often an attempt asks again where the server says when."""
    max_wait_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long an attempt waits in all: for its turn, and for the time that a server names."""
    max_per_host: Annotated[int, Meta(ge=1, le=64)] = 2
    """Requests to one host at once, over all children of this machine's workers."""
    delay_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Between the starts of two requests to one host."""
    proxy: str | None = None
    """http:// URL of a forward proxy; with `${NAME}` as above."""


def read_config(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> FetchConfig:
    """The config with its variables filled in."""
    try:
        config = msgspec.convert(dict(given), FetchConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of http_fetch is wrong: {error}. See docs/http-fetch.md.") from None
    headers = {name: filled(value, f"headers.{name}", environment) for name, value in config.headers.items()}
    for name, value in headers.items():
        _check_header(name, value)
    proxy = None if config.proxy is None else filled(config.proxy, "proxy", environment)
    if proxy is not None and not re.fullmatch(r"http://[^\s/?#]+/?", proxy):
        raise BadConfig("proxy must look like http://host:port or http://user:password@host:port.")
    return msgspec.structs.replace(config, headers=headers, proxy=proxy, body=_body(config))


def _check_header(name: str, value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not value.isascii() or not value.isprintable():
        raise BadConfig(f"Header {name!r} cannot be sent: a name has letters, digits and -, a value plain text.")
    if name.lower() in _OURS:
        raise BadConfig(f"Header {name!r} is not for a job to set: leave it out.")


def _body(config: FetchConfig) -> Any:
    if config.body is None:
        return None
    if config.method in ("GET", "HEAD"):
        raise BadConfig(f"A {config.method} has no body: set method to POST, or leave body out.")
    body = config.body
    if isinstance(body, str):
        try:
            body = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise BadConfig(
                f'body is no JSON ({error}). Write {{{{field}}}} within quotes, such as {{"query": "{{{{query}}}}"}}: '
                "a string that is nothing else becomes the field's value, whatever its type."
            ) from None
    check(body)
    return body
