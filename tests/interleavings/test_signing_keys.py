"""Rotation of the signing key, against signing and against other rotations."""

from __future__ import annotations

from interlock.apps.app import App
from interlock.tasks.shards import run_task_id
from tests.interleavings.operations import claim
from tests.interleavings.race_arena import Arena
from tests.interleavings.scheduler import Order, in_every_order, while_one_breaks
from tests.support.token_parts import part


async def rotate(kernel: App) -> str:
    return (await kernel.access.keyring.rotate()).kid


def pem_files(arena: Arena) -> set[str]:
    return {path.stem for path in arena.home.settings.signing_keys_dir.glob("*.pem")}


@in_every_order(rotate="rotate.before_commit", claim=("claim.before_commit", "claim.committed"))
async def test_rotation_and_claim_in_every_order_issue_a_verifiable_token(arena: Arena, order: Order) -> None:
    old = await arena.value("select kid from interlock.signing_keys where retired_at is null")
    task_id = run_task_id((await arena.submitted()).run_id, 0)
    played = await arena.play(order, rotate=rotate, claim=claim(task_id))
    token = played["claim"].capability_token
    assert part(token, 0)["kid"] == (played["rotate"] if order.before("rotate", "claim") else old)
    for kernel in arena.kernels:
        await kernel.access.keyring.refresh()
        assert (await kernel.access.tokens.verify(token)).task_id == task_id


@in_every_order(alike=("one", "other"), one="rotate.before_commit", other="rotate.before_commit")
async def test_two_rotations_in_every_order_leave_one_key_that_signs(arena: Arena, order: Order) -> None:
    before = pem_files(arena)
    played = await arena.play(order, one=rotate, other=rotate)
    signing = await arena.value("select kid from interlock.signing_keys where retired_at is null")
    if order.overlap:
        assert played.waits == order.meeting()
        assert (played.refusal(order.second), signing) == (("rotated_meanwhile", None), played[order.first])
        assert pem_files(arena) - before == {signing}
    else:
        assert signing == played[order.second]
        assert pem_files(arena) - before == {played["one"], played["other"]}


@while_one_breaks(one="rotate.before_commit", other="rotate.before_commit")
async def test_when_a_rotation_fails_the_other_makes_the_key(arena: Arena, order: Order) -> None:
    played = await arena.play(order, one=rotate, other=rotate)
    survivor = "other" if order.breaking == "one" else "one"
    signing = await arena.value("select kid from interlock.signing_keys where retired_at is null")
    assert (signing, played.waits) == (played[survivor], {(survivor, order.breaking)})
