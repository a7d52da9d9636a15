"""The config of a job that runs `http_fetch`, checked before any request is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from interlock.workers.block_follower.config import Seconds, check_header
from interlock.workers.context import TaskFailed
from interlock.workers.failures import BadConfig
from interlock.workers.operator_requests import Placeholders

Status = Annotated[int, Meta(ge=100, le=599)]


class FetchConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    headers: dict[str, str] = {}
    """Sent with every request. `${secret:NAME}` is replaced by a secret of the org."""
    body: Any = None
    """A JSON value, or its text. In its strings, `{{field}}` is replaced by a field of the payload, and
    `${secret:NAME}` by a secret of the org."""
    timeout_seconds: Seconds = 30.0
    """Timeout of one request including its redirects."""
    max_bytes: Annotated[int, Meta(ge=1, le=64 << 20)] = 1 << 20
    """Largest response body. A larger one fails the task."""
    follow_redirects: Annotated[int, Meta(ge=0, le=20)] = 5
    keep_body: Literal["inline", "required", "none"] = "inline"
    """inline: store the body in the result if it fits. required: fail the task if it does not. none: drop it."""
    accept: Annotated[tuple[Status, ...], Meta(max_length=100)] = ()
    """Statuses of 400 and above that are results instead of failures."""
    retry: Annotated[tuple[Status, ...], Meta(max_length=100)] = (408, 425, 429, 500, 502, 503, 504)
    """Statuses that are worth a retry."""
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    """Retries within one attempt, when the server names a time in Retry-After."""
    max_wait_seconds: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """Total time that an attempt may wait: for permits, and for times that servers name in Retry-After."""
    max_per_host: Annotated[int, Meta(ge=1, le=64)] = 2
    """Concurrent requests to one host, over all child processes of the workers on this machine."""
    delay_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    """Minimum time between the starts of two requests to one host."""
    proxy: str | None = None
    """http:// URL of a forward proxy. May contain `${secret:NAME}`, as in `headers`."""


def read_config(given: Mapping[str, Any], keys: Placeholders) -> FetchConfig:
    """Returns the checked config with its secrets filled in. Raises BadConfig."""
    try:
        config = msgspec.convert(dict(given), FetchConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"The config of http_fetch is invalid: {error}. See docs/http-fetch.md.") from None
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
        raise BadConfig(f"A {config.method} request has no body: set method to POST, or remove body.")
    body = config.body
    if isinstance(body, str):
        try:
            body = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise BadConfig(
                f'body is not valid JSON ({error}). Write {{{{field}}}} in quotes, as in {{"query": "{{{{query}}}}"}}: '
                "a string that consists of one field is replaced by the field's value, which keeps its type."
            ) from None
    check(body)
    return body


_FIELD: Final = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_FIELD_OR_SECRET: Final = re.compile(rf"{_FIELD.pattern}|\$\{{secret:[^}}]*\}}")
_PATH: Final = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_DEEPEST: Final = 50


def check(template: Any, depth: int = 0) -> None:
    """Checks the placeholders and the depth of a template. Raises BadConfig."""
    if depth > _DEEPEST:
        raise BadConfig(f"body is nested more than {_DEEPEST} levels deep: make it flatter.")
    if isinstance(template, str):
        for found in _FIELD.finditer(template):
            if not _PATH.fullmatch(found[1]):
                raise BadConfig(
                    f"body has the placeholder {found[0]}, which names no field: write {{{{field}}}} or "
                    "{{field.of.field}}."
                )
    for part in _parts(template):
        check(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, list) else []


def rendered(template: Any, payload: dict[str, Any], keys: Placeholders) -> bytes:
    """Returns the body as JSON. Raises TaskFailed if the payload lacks a field, or for a missing secret."""
    return msgspec.json.encode(_filled(template, payload, keys))


def _filled(template: Any, payload: dict[str, Any], keys: Placeholders) -> Any:
    match template:
        case str():
            return _string(template, payload, keys)
        case dict():
            return {
                _text(_string(name, payload, keys)): _filled(value, payload, keys) for name, value in template.items()
            }
        case list():
            return [_filled(value, payload, keys) for value in template]
    return template


def _string(template: str, payload: dict[str, Any], keys: Placeholders) -> Any:
    """Fills fields and secrets in one pass, so that neither is searched for placeholders of the other."""
    alone = _FIELD.fullmatch(template)
    if alone is not None:
        return _field(alone[1], payload)

    def value(found: re.Match[str]) -> str:
        return keys.fill(found[0], "body") if found[1] is None else _text(_field(found[1], payload))

    return _FIELD_OR_SECRET.sub(value, template)


def _text(value: Any) -> str:
    """Formats a value for use inside a longer string: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _field(path: str, payload: dict[str, Any]) -> Any:
    value: Any = payload
    for name in path.split("."):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            raise TaskFailed(f"The payload has no field {path!r}, which `body` of the config refers to.", "BadPayload")
    return value
