"""All rules in one machine, and its end: whatever state an example leaves, everything it began comes to an end."""

from __future__ import annotations

import sys

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.model.doors import definitions, items
from tests.model.driving import dispatchers
from tests.model.loops import Loops
from tests.model.parts import Definition
from tests.model.users import Users
from tests.model.workers import COMPLETED

_ROUNDS = 10
"""More than any example needs: a task may fail a few times by itself, where a dispatcher runs it."""


class KernelMachine(Loops, Users):
    @initialize(at=dispatchers, definition=definitions, listed=items, most=st.integers(0, 4))
    def begin_with_work(self, at: int, definition: Definition, listed: list[tuple[str | None, str]], most: int) -> None:
        """A first run, of which a worker holds a part."""
        self.begin(at, definition, listed)
        if most:
            self.claim_range(at, self.model.runs[0], 0, len(listed), most)

    def teardown(self) -> None:
        # Not after a failure: that is what there is to see.
        if sys.exc_info()[0] is None:
            self.drive_to_the_end()

    def drive_to_the_end(self) -> None:
        kinds = {(task.status, task.parked, task.dead): task for task in self.model.tasks if task.status != "Running"}
        for task in kinds.values():
            self.explain(0, task)
        for _ in range(_ROUNDS):
            if all(task.over for task in self.model.tasks):
                break
            self._round()
        self._nothing_is_left()

    def _round(self) -> None:
        """Two minutes of a fleet at work: what waits is brought on, and whoever gets a task reports it."""
        self.clock.advance(100)
        self.revive_dead_messages(0)
        for name in ("reaper", "retries", "reconciler", "relay"):
            self.run_loop(1, name)
        while self._serve():
            self.clock.advance(1)

    def _serve(self) -> bool:
        """One worker: takes all there is, and reports all it holds."""
        letters = self.receive_all(0, 30.0)
        self.hurry = True
        for letter in letters:
            self.claim_letter(0, letter, most=100)
        self.hurry = False
        if holds := self.live_holds():
            self.complete(0, [COMPLETED.of(hold) for hold in holds])
        return bool(letters)

    def _nothing_is_left(self) -> None:
        stuck = [task for task in self.model.tasks if not task.over]
        assert not stuck, f"not brought to an end: {[(task, task.status, task.parked) for task in stuck]}"
        self.run_loop(0, "run-counters")
        unended = [run for run in self.model.runs if run.ended_at is None]
        assert not unended, f"all tasks ended, but not {unended}"
        (left,) = self.world.select(
            "select (select count(*) from interlock.slots) + (select count(*) from interlock.run_deltas) as n"
        )
        assert left["n"] == 0
