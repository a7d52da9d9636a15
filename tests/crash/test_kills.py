"""Kills processes and servers of an `interlock up` at random under load. The ledger outside then audits the system."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from valkey.exceptions import ValkeyError

from tests.crash.installation import Installation, installation
from tests.crash.ledger import Ledger
from tests.crash.load import Load
from tests.crash.seed import KILLS, random_for
from tests.support.polls import eventually


def _child(name: str) -> Callable[[Installation], Awaitable[None]]:
    async def blow(here: Installation) -> None:
        await eventually(lambda: here.kill_child(name))

    return blow


def _server(pid_file: str) -> Callable[[Installation], Awaitable[None]]:
    async def blow(here: Installation) -> None:
        await eventually(lambda: here.kill_server(pid_file))

    return blow


async def _flush(here: Installation) -> None:
    try:
        await here.flush()
    except (ValkeyError, OSError):  # Valkey was just killed, so its data is gone anyway
        return


BLOWS: dict[str, Callable[[Installation], Awaitable[None]]] = {
    "gateway": _child("gateway"),
    "dispatcher": _child("dispatcher"),
    "worker": _child("worker"),
    "postgres": _server("state/data/postmaster.pid"),
    "valkey": _server("valkey/data/valkey.pid"),
    "valkey forgets": _flush,
    "up": Installation.kill,
}


async def test_accepted_work_is_not_lost_or_done_twice_under_random_kills() -> None:
    chance = random_for("blows")
    async with installation() as here:
        ledger = Ledger(here.journal)
        load = Load(here.client, ledger, "kills")
        blows = [*BLOWS, *(chance.choice(list(BLOWS)) for _ in range(KILLS - len(BLOWS)))]
        chance.shuffle(blows)
        async with load.running(clients=4):
            for name in blows:
                await ledger.reaches(len(ledger.accepted) + chance.randint(1, 6))
                await BLOWS[name](here)
                ledger.blows += 1
                if not here.alive:
                    await here.start()
        await load.settle(here.info["state_url"])
