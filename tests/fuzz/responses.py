"""Properties that every response must have, and raw requests that no client library would send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tests.fuzz.checks import DOCUMENTED, PROBLEM


class Answer(Protocol):
    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content(self) -> bytes: ...


@dataclass(frozen=True)
class RawAnswer:
    """One response as received over the wire."""

    status_code: int
    headers: dict[str, str]
    content: bytes


def require_orderly(answer: Answer, what: Any = "") -> int:
    """Checks that there is no server error, and that a refusal is a documented problem with a request id."""
    assert answer.status_code < 500, (what, answer.content)
    assert answer.headers.get("x-request-id"), what
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == PROBLEM, what
        problem = json.loads(answer.content)
        assert (answer.status_code, problem["code"]) in DOCUMENTED, (what, problem)
        assert problem["request_id"] == answer.headers["x-request-id"]
    return answer.status_code


async def exchanged(url: str, raw: bytes, *, patience: float = 10) -> list[RawAnswer]:
    """Sends bytes and reads responses until the server closes the connection or sends nothing more."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
    answers = []
    try:
        writer.write(raw)
        while True:
            async with asyncio.timeout(patience):
                answers.append(await _answer(reader))
            if answers[-1].headers.get("connection") == "close":
                return answers
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return answers
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> RawAnswer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return RawAnswer(int(head[0].split()[1]), headers, body)
