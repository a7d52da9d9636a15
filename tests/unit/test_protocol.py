"""What a connection does with the pieces of a reply."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from interlock.connections.protocol import MOST_GATHERED, Gathered


class Wire:
    """A transport that remembers what it was asked to do."""

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
    await asyncio.sleep(0)  # noqa: TID251 - of the loop, and no wait


async def test_what_is_written_in_one_turn_goes_out_together() -> None:
    connection, wire = gathered()
    connection.write(b"head")
    connection.write(b"body")
    assert wire.done == []
    await turn()
    assert wire.done == [b"headbody"]
    connection.write(b"next")
    await turn()
    assert wire.done == [b"headbody", b"next"]


async def test_more_than_is_held_back_goes_out_at_once_and_nothing_comes_twice() -> None:
    connection, wire = gathered()
    connection.write(b"head")
    connection.write(b"." * MOST_GATHERED)
    connection.write(b"rest")
    assert wire.done == [b"head" + b"." * MOST_GATHERED]
    await turn()
    assert b"".join(cast("list[bytes]", wire.done)) == b"head" + b"." * MOST_GATHERED + b"rest"


async def test_a_connection_that_is_closed_sends_what_it_holds_first() -> None:
    connection, wire = gathered()
    connection.write(b"reply")
    connection.close()
    assert wire.done == [b"reply", "closed"]
    await turn()
    assert wire.done == [b"reply", "closed"]
    assert connection.is_closing()
