"""Rules for claims: one task, a list, one or several ranges, with the message that named them or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import jwt
from hypothesis import strategies as st
from hypothesis.stateful import rule

from interlock.wire.attempts import ClaimBatchReply, ClaimRange, ClaimReply, ClaimRequest
from tests.model.dispatchers import ANY_WORKER, PLATFORM_WORKER, Crashed
from tests.model.model_types import UNKNOWN, Hold, Run, Task
from tests.model.rule_base import Driven, Letter, chosen, dispatchers, often, picks, seldom, several

_PLATFORM = ("platform", "ecs_platform")
_START = "select (body ->> 'start')::int as start from interlock.queue_messages where message_id = $1"
_CURRENT = """
    select 1 from interlock.queue_messages
    where message_id = $1 and receipt = $2::text::uuid and dead_at is null"""

crashes = st.sampled_from([None] * 9 + ["claim.before_commit", "claim.committed", "settle.before_commit"])


class Claiming(Driven):
    @rule(at=dispatchers, pick=picks, queued=often, limited=seldom, crash=crashes)
    def claim_one(self, at: int, pick: int, queued: bool, limited: bool, crash: str | None) -> None:
        task = self.some_task(pick, status="Queued" if queued else None)
        self.claim_ids(at, [task.task_id], one=True, limited=limited, crash=crash)

    @rule(at=dispatchers, numbers=several, unknown=seldom, grouped=st.booleans(), crash=crashes)
    def claim_a_list(self, at: int, numbers: list[int], unknown: bool, grouped: bool, crash: str | None) -> None:
        ids = list(dict.fromkeys(self.some_task(n, status="Queued").task_id for n in numbers[:-1] * 2 + numbers))
        self.claim_ids(at, ids + [UNKNOWN] * unknown, grouped=grouped, crash=crash)

    def some_holds(self, numbers: Sequence[int], age: str) -> list[Hold]:
        """Chooses among the claims that workers hold, or claims first. Empty if nothing can be claimed."""
        if not self.live_holds() and (age == "live" or not self.holds):
            task = self.some_task(numbers[0], status="Queued")
            self.claim_ids(0, [task.task_id], one=True)
        pools = {"live": self.live_holds(), "late": self.late_holds(), "any": self.holds}
        pool = pools[age] or self.holds
        return list(dict.fromkeys(chosen(pool, n) for n in numbers)) if pool else []

    def claim_ids(
        self,
        at: int,
        ids: list[UUID],
        *,
        one: bool = False,
        grouped: bool = False,
        limited: bool = False,
        crash: str | None = None,
        letter: Letter | None = None,
    ) -> None:
        what: dict[str, Any] = {"task_id": ids[0]} if one else {"task_ids": ids}
        committed, reply = self._claim(at, what, grouped=grouped, limited=limited, crash=crash, letter=letter)
        if not committed:
            return self.look("claim, lost")
        taken, reasons = self.model.claim(ids, self._worker(at), reach=_PLATFORM if limited else None)
        if reply is not None:
            actual = {claim.task_id: claim.reason for claim in reply.claims if claim.status == "NotClaimed"}
            assert actual == reasons, f"{actual}, not {reasons}"
        self._take_over(reply, taken)
        return self.look(f"claim {taken}, not {list(reasons.values())}; {crash if reply is None else ''}")

    @rule(
        at=dispatchers,
        numbers=several,
        first=st.integers(0, 3),
        size=st.integers(1, 6),
        limit=st.integers(1, 7),
        crash=crashes,
    )
    def claim_ranges(self, at: int, numbers: list[int], first: int, size: int, limit: int, crash: str | None) -> None:
        """Claims one range or the start of it, or the same range of several runs."""
        runs = list(dict.fromkeys(self.some_run(n) for n in numbers))
        if len(runs) > 1:
            self._claim_whole_ranges(at, runs, first, first + size - 1, crash)
        else:
            self.claim_range(at, runs[0], first, first + size - 1, limit, crash=crash)

    def claim_range(
        self,
        at: int,
        run: Run,
        first: int,
        last: int,
        limit: int,
        *,
        crash: str | None = None,
        letter: Letter | None = None,
    ) -> None:
        what = {"run_id": run.run_id, "start": first, "end": last, "limit": limit}
        current = letter is not None and self.is_current(letter)
        committed, reply = self._claim(at, what, grouped=limit % 2 == 0, crash=crash, letter=letter)
        if not committed:
            return self.look("claim of a range, lost")
        wanted = [t.task_id for t in run.tasks_in(self.model.tasks) if first <= (t.index or 0) <= last]
        size = last - first + 1
        taken, _ = self.model.claim(wanted, self._worker(at), limit=limit if limit < size else None)
        self._take_over(reply, taken)
        if letter is not None and reply is not None:
            rest = last - max(t.index or 0 for t in taken) if taken and limit < size and len(taken) == limit else 0
            assert reply.remaining == rest
            if current:
                self._settled(letter, last - rest + 1 if rest else None)
        return self.look(f"claim {first}-{last} of a run, {limit} at most: {taken}; {crash if reply is None else ''}")

    def _claim_whole_ranges(self, at: int, runs: list[Run], first: int, last: int, crash: str | None) -> None:
        spans = [ClaimRange(run.run_id, first, last) for run in runs]
        committed, reply = self._claim(at, {"ranges": spans}, grouped=True, crash=crash)
        if not committed:
            return self.look("claim of ranges, lost")
        tasks = [task for run in runs for task in run.tasks_in(self.model.tasks)]
        wanted = [task.task_id for task in tasks if first <= (task.index or 0) <= last]
        taken, _ = self.model.claim(wanted, self._worker(at))
        self._take_over(reply, taken)
        return self.look(f"claim {first}-{last} of {len(runs)} runs: {taken}; {crash if reply is None else ''}")

    def _worker(self, at: int) -> str:
        return f"worker of dispatcher {at}"

    def _claim(
        self,
        at: int,
        what: dict[str, Any],
        *,
        grouped: bool = False,
        limited: bool = False,
        crash: str | None = None,
        letter: Letter | None = None,
    ) -> tuple[bool, ClaimBatchReply | None]:
        """Returns whether the claim committed, and the reply: None if the dispatcher died in between."""
        self.clock.advance(0.001)
        message = letter.as_receipt() if letter else None
        request = ClaimRequest(worker_id=self._worker(at), grouped=grouped, tokens=not grouped, message=message, **what)
        who = PLATFORM_WORKER if limited else ANY_WORKER
        try:
            return True, self.call(at, lambda kernel: kernel.tasks.claims.claim(request, who), crash=crash)
        except Crashed:
            return crash != "claim.before_commit", None

    def _take_over(self, reply: ClaimBatchReply | None, taken: Sequence[Task]) -> None:
        if reply is None:
            return
        claims = [claim for claim in reply.claims if claim.status == "Claimed"]
        holds = [self._hold(claim) for claim in claims]
        holds += [Hold(t.task_id, group.attempt, group.lease_token) for group in reply.groups for t in group.tasks]
        expiry = {claim.task_id: claim.lease_expires_at for claim in claims}
        expiry |= {t.task_id: group.lease_expires_at for group in reply.groups for t in group.tasks}
        by_task = {hold.task_id: hold for hold in holds}
        assert by_task.keys() == {task.task_id for task in taken}, f"claimed {by_task.keys()}, not {taken}"
        for task in taken:
            hold = by_task[task.task_id]
            actual = hold.attempt, expiry[task.task_id]
            assert actual == (task.attempt, task.lease_expires_at), (
                f"{task}: a lease {actual}, not {task.lease_expires_at}"
            )
            task.lease_token = hold.lease_token
            self.holds.append(hold)

    def _hold(self, claim: ClaimReply) -> Hold:
        assert claim.task_id
        assert claim.attempt
        assert claim.lease_token
        if claim.capability_token is not None:
            self.check_new_token(claim.capability_token)
        return Hold(claim.task_id, claim.attempt, claim.lease_token, claim.capability_token)

    def check_new_token(self, token: str) -> None:
        (active,) = self.world.select("select kid from interlock.signing_keys where retired_at is null")
        assert jwt.get_unverified_header(token)["kid"] == active["kid"]

    def is_current(self, letter: Letter) -> bool:
        """True if neither a later delivery nor an ack has invalidated its receipt."""
        return bool(self.world.select(_CURRENT, int(letter.message_id), letter.receipt))

    def _settled(self, letter: Letter, rest_from: int | None) -> None:
        """Checks that the message of a claim is gone, or names the tasks that the worker had no room for."""
        rows = self.world.select(_START, int(letter.message_id))
        assert [row["start"] for row in rows] == ([] if rest_from is None else [rest_from])
