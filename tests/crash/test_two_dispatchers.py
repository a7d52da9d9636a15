"""Two dispatchers behind one address are killed in turn: one is always enough."""

from __future__ import annotations

from tests.crash.deployment import deployed
from tests.crash.ledger import Ledger
from tests.crash.load import KINDS, Load
from tests.crash.seed import KILLS, dice


async def test_two_dispatchers_killed_in_turn_lose_nothing_and_work_goes_on_meanwhile() -> None:
    chance = dice("deaths of two dispatchers")
    async with deployed() as deployment:
        first = deployment["dispatcher"]
        second = deployment.add_listening("dispatcher", "dispatcher-2", listener=first.listener)
        await second.start()
        ledger = Ledger(deployment.journal)
        load = Load(deployment.client, ledger, "two dispatchers")
        async with load.running():
            for number in range(KILLS // 2):
                victim = (first, second)[number % 2]
                await ledger.reaches(len(ledger.accepted) + chance.randint(1, 4))
                await victim.kill()
                ledger.blows += 1
                # New work comes to its end while only the other one runs, which was the victim before.
                await load.ended(await load.submit(chance.choice(list(KINDS.values()))))
                await victim.start()
        await load.settle(deployment.state_url)
