"""Two dispatchers on one address are killed alternately: one is always enough."""

from __future__ import annotations

from tests.crash.ledger import Ledger
from tests.crash.load import KINDS, Load
from tests.crash.seed import KILLS, random_for
from tests.support.deployment import deployed


async def test_two_dispatchers_killed_alternately_lose_nothing_while_work_continues() -> None:
    chance = random_for("deaths of two dispatchers")
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
                # New work completes while only the other dispatcher runs, which was the previous victim.
                await load.ended(await load.submit(chance.choice(list(KINDS.values()))))
                await victim.start()
        await load.settle(deployment.state_url)
