"""What the job's config says, checked before anything is asked of anybody."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.pipeline.failures import BadConfig
from interlock.pipeline.follower.config import Seconds, check_header
from interlock.pipeline.http_fetch.template import check
from interlock.pipeline.placeholders import Placeholders

Status = Annotated[int, Meta(ge=100, le=599)]


class FetchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, str] = {}
    """Sent with every request. `${secret:NAME}` stands for a secret of the org."""
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
    """http:// URL of a forward proxy; with `${secret:NAME}` as above."""


def read_config(given: Mapping[str, Any], keys: Placeholders) -> FetchConfig:
    """The config with its keys filled in."""
    try:
        config = msgspec.convert(dict(given), FetchConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of http_fetch is wrong: {error}. See docs/http-fetch.md.") from None
    headers = {name: keys.fill(value, f"headers.{name}") for name, value in config.headers.items()}
    for name, value in headers.items():
        check_header(name, value)
    proxy = None if config.proxy is None else keys.fill(config.proxy, "proxy")
    if proxy is not None and not re.fullmatch(r"http://[^\s/?#]+/?", proxy):
        raise BadConfig("proxy must look like http://host:port or http://user:password@host:port.")
    return msgspec.structs.replace(config, headers=headers, proxy=proxy, body=_body(config))


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
