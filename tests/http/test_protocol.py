"""Buffering of the pieces of a reply by a connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from interlock.http.connection import MAX_GATHERED, Gathered


class Wire:
    """A transport that records its calls."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done


def gathered() -> tuple[Any, Wire]:
    wire = Wire()
    return Gathered(cast("asyncio.Transport", wire)), wire


async def turn() -> None:
    await asyncio.sleep(0)  # noqa: TID251 - one iteration of the loop, not a wait


async def test_writes_of_one_loop_iteration_are_sent_together() -> None:
    connection, wire = gathered()
    connection.write(b"head")
    connection.write(b"body")
    assert wire.done == []
    await turn()
    assert wire.done == [b"headbody"]
    connection.write(b"next")
    await turn()
    assert wire.done == [b"headbody", b"next"]


async def test_writes_beyond_the_buffer_are_sent_immediately_and_once() -> None:
    connection, wire = gathered()
    connection.write(b"head")
    connection.write(b"." * MAX_GATHERED)
    connection.write(b"rest")
    assert wire.done == [b"head" + b"." * MAX_GATHERED]
    await turn()
    assert b"".join(cast("list[bytes]", wire.done)) == b"head" + b"." * MAX_GATHERED + b"rest"


async def test_closing_a_connection_flushes_its_buffer() -> None:
    connection, wire = gathered()
    connection.write(b"reply")
    connection.close()
    assert wire.done == [b"reply", "closed"]
    await turn()
    assert wire.done == [b"reply", "closed"]
    assert connection.is_closing()
