"""HTTP before there is a request: what cannot be parsed, and heads that do not end."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from uuid import uuid4

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from interlock.api.problems import PROBLEM_JSON, problem_document
from interlock.errors import BadRequest, HeadersTooLarge, InterlockError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together. The parser has no limit of its own: a stranger could fill the memory."""


class Protocol(HttpToolsProtocol):
    """Refuses in the same form as everything behind it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = False

    def on_message_begin(self) -> None:
        self._head_bytes, self._in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._head_bytes = MAX_HEAD_BYTES + 1
            raise httptools.HttpParserError
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("")

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the base class' signature
        """Where the base class ends up with whatever it cannot parse."""
        if self._head_bytes > MAX_HEAD_BYTES:
            error: InterlockError = HeadersTooLarge(
                f"The request line and headers have more than {MAX_HEAD_BYTES} bytes; send less."
            )
        else:
            error = BadRequest("This is not an HTTP/1.1 request that can be read.")
        self.transport.write(_response(error))
        self.transport.close()


def _response(error: InterlockError) -> bytes:
    request_id = uuid4().hex
    body = problem_document(error, request_id)
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: {PROBLEM_JSON}\r\n"
        f"content-length: {len(body)}\r\n"
        f"x-request-id: {request_id}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
