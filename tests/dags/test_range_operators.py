"""The operators that turn ranges into ranges, against a model that checks every position."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.dags import range_operators
from interlock.dags.checks import range_problem
from interlock.dags.partitioning import AGGREGATOR, SPLITTER
from interlock.tasks.inline_runtime import Call, OperatorFailed
from interlock.wire.attempts import WriteGrant
from tests.support.dags import problems_of

OUTPUT = WriteGrant(0, uuid4(), uuid4(), "file:///w", "file:///b")
Range = tuple[int, int]

sizes = st.integers(1, 20)
positions = st.integers(-100, 200)


@dataclass
class Task:
    """Calls an operator like the dispatcher: step by step, with the state of the last step."""

    config: dict[str, Any]
    state: Any = None
    steps: list[list[Range]] = field(default_factory=list)

    async def run(self, operator: str, **payload: int) -> list[Range]:
        react, place = range_operators.OPERATORS[operator].react, None
        emitted: list[Range] = []
        while True:
            reaction = await react(Call(payload, self.config, [OUTPUT], self.state, place))
            found = [(event.start or 0, event.end or 0) for event in reaction.events]
            assert all(event.partition_key == f"{event.start}-{event.end}" for event in reaction.events)
            assert len(found) <= range_operators.STEP
            emitted += found
            self.steps.append(found)
            self.state = self.state if reaction.state is None else reaction.state
            place = reaction.place
            if place is None:
                return emitted


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_operators, "STEP", 3)


@given(start=positions, length=st.integers(1, 200), size=sizes)
async def test_scope_is_split_at_multiples_of_the_chunk_size(start: int, length: int, size: int) -> None:
    end = start + length - 1
    emitted = await Task({"size": size}).run(SPLITTER, start=start, end=end)
    naive: list[Range] = []
    for position in range(start, end + 1):
        if naive and position % size:
            naive[-1] = (naive[-1][0], position)
        else:
            naive.append((position, position))
    assert emitted == naive


Move = tuple[str, int, int]
moves = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.integers(1, 60), st.just(0)),
        st.tuples(st.just("rewrite"), st.integers(0, 200), st.integers(0, 40)),
    ),
    max_size=12,
)


@settings(max_examples=200)
@given(size=sizes, begin=st.integers(0, 60), moves=moves)
async def test_each_range_is_emitted_when_complete_and_when_rewritten(size: int, begin: int, moves: list[Move]) -> None:
    task = Task({"size": size, "start": begin})
    cursor, seen = -1, set[int]()
    for kind, first, length in moves:
        if kind == "advance":
            before, cursor = cursor, cursor + first
            emitted = await task.run(AGGREGATOR, start=before + 1, end=cursor, cursor=cursor)
            expected = _complete(size, begin, cursor) - seen
            seen |= expected
        else:
            last = min(cursor, first + length)
            if last < first:
                continue
            emitted = await task.run(AGGREGATOR, start=0, end=cursor, changed_start=first, changed_end=last)
            expected = {n for n in seen if n * size <= last and (n + 1) * size - 1 >= first}
        assert emitted == [(n * size, (n + 1) * size - 1) for n in sorted(expected)]
    assert seen == _complete(size, begin, cursor)


def _complete(size: int, begin: int, cursor: int) -> set[int]:
    """Returns the ranges that start at or after the start and all of whose positions are complete."""
    return {n for n in range(cursor // size + 2) if n * size >= begin and (n + 1) * size - 1 <= cursor}


@settings(max_examples=200)
@given(size=sizes, begin=st.integers(0, 60), cuts=st.sets(st.integers(1, 150)), data=st.data())
async def test_partitions_in_any_order_become_ranges(
    size: int, begin: int, cuts: set[int], data: st.DataObject
) -> None:
    edges = [0, *sorted(cuts)]
    partitions = [(start, end - 1) for start, end in pairwise(edges)]
    order = data.draw(st.permutations(partitions))
    again = data.draw(st.lists(st.sampled_from(partitions), max_size=3)) if partitions else []
    task, there = Task({"size": size, "start": begin}), set[int]()
    for start, end in [*order, *again]:
        there |= set(range(start, end + 1))
        emitted = await task.run(AGGREGATOR, start=start, end=end)
        touched = {position // size for position in range(start, end + 1)}
        expected = [n for n in sorted(touched) if n * size >= begin and set(range(n * size, (n + 1) * size)) <= there]
        assert emitted == [(n * size, (n + 1) * size - 1) for n in expected]


@pytest.mark.parametrize("operator", [SPLITTER, AGGREGATOR])
@pytest.mark.parametrize("config", [{}, {"size": 0}, {"size": 1.5}, {"size": True}, {"size": 5, "width": 1}])
async def test_invalid_config_fails_the_task_with_a_message(operator: str, config: dict[str, Any]) -> None:
    assert range_problem(operator, config)
    with pytest.raises(OperatorFailed) as failed:
        await Task(config).run(operator, start=0, end=9)
    assert failed.value.error_class == "BadConfig"


async def test_task_without_scope_or_output_fails_with_a_message() -> None:
    with pytest.raises(OperatorFailed, match="not a scope"):
        await Task({"size": 5}).run(SPLITTER, start=0)
    with pytest.raises(OperatorFailed, match="no output"):
        await range_operators.split(Call({"start": 0, "end": 9}, {"size": 5}, [], None, None))


DAG = """name: d
jobs:
  - { name: s, activation: source, source: { kind: manual }, operator: echo, outputs: [out, more] }
  - name: r
    runtime: RUNTIME
    operator: OPERATOR
    inputs: [INPUTS]
    outputs: [OUTPUTS]
    config: CONFIG
"""
GOOD = {
    "RUNTIME": "dispatcher",
    "INPUTS": "{ from: { job: s, output: out } }",
    "OUTPUTS": "ranges",
    "CONFIG": "{ size: 5 }",
}


@pytest.mark.parametrize("operator", [SPLITTER, AGGREGATOR])
@pytest.mark.parametrize(
    ("change", "line", "instead"),
    [
        ({}, None, ""),
        ({"CONFIG": "{ size: 0 }"}, 9, "size: 1000"),
        ({"CONFIG": "{ width: 5 }"}, 9, "size: 1000"),
        ({"RUNTIME": "platform"}, 5, "write runtime: dispatcher"),
        ({"OUTPUTS": "a, b"}, 8, "write outputs: [ranges]"),
        (
            {"INPUTS": "{ from: { job: s, output: out } }, { from: { job: s, output: more } }"},
            7,
            "a separate job for each input",
        ),
    ],
)
def test_requirements_of_range_operators_are_checked_in_the_dag(
    operator: str, change: dict[str, str], line: int | None, instead: str
) -> None:
    text = DAG.replace("OPERATOR", operator)
    for name, value in (GOOD | change).items():
        text = text.replace(name, value)
    found = problems_of(text)
    assert [problem.line for problem in found] == ([] if line is None else [line])
    assert all(instead in problem.instead for problem in found)
