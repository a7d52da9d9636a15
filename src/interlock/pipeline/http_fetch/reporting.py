"""The reply of a server as a task's result."""

from __future__ import annotations

import base64
import hashlib
from email.message import Message
from typing import Any, Final

import msgspec

from interlock.outbound.sending import Reply
from interlock.pipeline.http_fetch.config import FetchConfig
from interlock.workers.context import TaskFailed, plain

SHOWN_HEADERS: Final = (
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-length",
    "content-type",
    "date",
    "etag",
    "expires",
    "last-modified",
    "link",
    "location",
    "retry-after",
    "server",
    "vary",
    "x-robots-tag",
)
_LONGEST_HEADER: Final = 1_000
_LONGEST_URL: Final = 8_000
_USUAL: Final = "utf-8"


def result_of(reply: Reply, config: FetchConfig, elapsed: float, limit: int) -> dict[str, Any]:
    """`limit`: bytes that a result may have as JSON."""
    result: dict[str, Any] = {
        "url": plain(reply.url, _LONGEST_URL),
        "status": reply.status,
        "headers": {
            name: plain(reply.headers[name], _LONGEST_HEADER) for name in SHOWN_HEADERS if name in reply.headers
        },
        "bytes": len(reply.body),
        "sha256": hashlib.sha256(reply.body).hexdigest(),
        "elapsed_ms": round(elapsed * 1000),
    }
    if config.keep_body == "none":
        return result
    whole = result | _body(reply)
    if len(reply.body) <= limit and len(msgspec.json.encode(whole)) <= limit:
        return whole
    if config.keep_body == "required":
        raise TaskFailed(
            f"The reply has {len(reply.body)} bytes, and with them the result would have more than the {limit} that "
            "are kept: raise result_limit_bytes, or let keep_body be inline or none.",
            "BodyTooLarge",
        )
    return result | {"body_omitted": True}


def _body(reply: Reply) -> dict[str, str]:
    text = _text(reply)
    if text is not None:
        return {"body": text, "body_encoding": "text"}
    return {"body": base64.b64encode(reply.body).decode(), "body_encoding": "base64"}


def _text(reply: Reply) -> str | None:
    """None for what is no text, or none that a store takes."""
    text = _decoded(reply.body, _charset(reply.headers.get("content-type", "")))
    if text is None:
        return None
    return None if "\0" in text or plain(text, len(text)) != text else text


def _charset(content_type: str) -> str:
    header = Message()
    header["content-type"] = plain(content_type, _LONGEST_HEADER).replace("\n", " ").replace("\r", " ")
    return str(header.get_param("charset", _USUAL))


def _decoded(body: bytes, charset: str) -> str | None:
    try:
        return body.decode(charset)
    except UnicodeError:
        return None
    except (LookupError, ValueError):  # no charset that there is; Python's codecs that are none of text are refused
        return _decoded(body, _USUAL)
