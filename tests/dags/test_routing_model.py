"""Random pipelines, event orders, duplicates and losses: the final materialised state is always the same."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.dags.routing_pipeline import WIDTH, Node, Pipeline, pipeline

EXAMPLES: Final = int(os.environ.get("INTERLOCK_MODEL_EXAMPLES") or 30)
PARTITIONS: Final = 2
"""Few, so that the same partitions are hit repeatedly."""


class World:
    """One event loop and one database for all examples: Hypothesis calls from synchronous code."""

    def __init__(self, state_url: str, directory: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._opened = pipeline(state_url, directory)
        self.pipeline: Pipeline = self.loop.run_until_complete(self._opened.__aenter__())

    def close(self) -> None:
        self.loop.run_until_complete(self._opened.__aexit__(None, None, None))
        self.loop.close()


@pytest.fixture
def world(state_url: str, tmp_path: Path) -> Iterator[World]:
    world = World(state_url, tmp_path)
    yield world
    world.close()


@st.composite
def dags(draw: DrawFn) -> list[Node]:
    """Draws sources, then jobs that read earlier nodes. Jobs wait for several inputs only if their bounds agree."""
    sources = [Node(f"s{n}", stream=draw(st.booleans())) for n in range(draw(st.integers(1, 2)))]
    nodes = list(sources)
    regular = {node.name for node in sources if not node.stream}  # partitions with the same bounds
    for n in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from([node.name for node in nodes]), min_size=1, max_size=3, unique=True))
        node = Node(f"j{n}", tuple(names), per_update=draw(st.booleans()), wait_for_all=True)
        streams = {source.name for source in sources if source.stream}
        irregular = [name for name in names if name not in regular | streams]
        if len(names) > 1 and irregular:
            # Bounds that depend on the position of a stream agree with no others.
            node = replace(node, inputs=(irregular[0],))
        if set(node.inputs) & regular:
            regular.add(node.name)
        nodes.append(node)
    return nodes


Step = tuple[str, int, int]
STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(["change", "report", "again", "lose", "router", "scopes", "start", "start", "finish", "quiet"]),
        st.integers(0, 7),
        st.integers(0, PARTITIONS - 1),
    ),
    min_size=10,
    max_size=60,
)


async def play(pipe: Pipeline, nodes: list[Node], steps: list[Step]) -> None:
    await pipe.lay(nodes)
    sources = [node for node in nodes if not node.inputs]
    reported: dict[tuple[str, int], bool] = {}
    for what, which, place in steps:
        source = sources[which % len(sources)]
        if what in ("report", "change"):
            await change(pipe, source, place, which)
            reported[source.name, place] = True
            if what == "change":
                await pipe.run("router")
        elif what == "again" and not source.stream and (source.name, place) in reported:
            # The same event as accepted before: a producer that got no answer repeats it.
            known = await pipe.rows.fetchval(
                "select split_part(scope, '#', 2)::bigint from interlock.dataset_events where dataset_version = $1"
                " and range_start = $2 order by event_id desc limit 1",
                pipe.versions[source.name][1],
                place * WIDTH,
            )
            await pipe.report(source.name, place * WIDTH, place * WIDTH + WIDTH - 1, again=known)
        elif what == "lose":
            await pipe.lose_events()
        elif what in ("router", "scopes"):
            await pipe.run(what)
        elif what == "start":
            await pipe.start(which)
        elif what in ("finish", "quiet"):
            await pipe.finish(which, emit=what == "finish")
    await pipe.settle()


async def change(pipe: Pipeline, source: Node, place: int, which: int) -> None:
    """Writes or rewrites a partition; advances a stream, or rewrites a part of it."""
    if not source.stream:
        await pipe.report(source.name, place * WIDTH, place * WIDTH + WIDTH - 1)
    elif which % 2 and pipe.cursors.get(source.name, -1) >= 0:
        first = min(place * 7, pipe.cursors[source.name])
        # If the event of a rewritten range is lost, the change is lost: producers retry until they get an answer.
        await pipe.report(source.name, first, pipe.cursors[source.name])
        await pipe.run("router")
    else:
        await pipe.advance(source.name, pipe.cursors.get(source.name, -1) + place + 1)


def expected(pipe: Pipeline, nodes: list[Node]) -> dict[str, dict[int, object]]:
    """Returns the value of every job for every cell that all of its inputs have."""
    made: dict[str, dict[int, object]] = {}
    for node in nodes:
        if not node.inputs:
            made[node.name] = dict(pipe.data[node.name])
            continue
        cells = set.intersection(*(set(made[name]) for name in node.inputs))
        if any(not pipe.nodes[name].stream for name in node.inputs):
            cells = whole_partitions(node, pipe, cells)
        made[node.name] = {cell: (node.name, *(made[name][cell] for name in node.inputs)) for cell in cells}
    return made


def whole_partitions(node: Node, pipe: Pipeline, cells: set[int]) -> set[int]:
    """Drops cells of partitions whose end a stream, read together with them, has not reached."""
    if not any(pipe.nodes[name].stream for name in node.inputs):
        return cells
    return {
        cell
        for cell in cells
        if all(other in cells for other in range(cell - cell % WIDTH, cell - cell % WIDTH + WIDTH))
    }


def test_materialised_state_is_independent_of_order_repeats_and_losses(world: World) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="INTERLOCK_MODEL_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(nodes=dags(), steps=STEPS)
    def run(nodes: list[Node], steps: list[Step]) -> None:
        pipe = world.pipeline
        pipe.data.clear()
        pipe.cursors.clear()
        pipe.held.clear()
        world.loop.run_until_complete(play(pipe, nodes, steps))
        wanted = expected(pipe, nodes)
        assert {node.name: pipe.data[node.name] for node in nodes} == wanted

    run()
