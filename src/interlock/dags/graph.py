"""Layout of a DAG for drawing: boxes in layers, and lines from each layer to the next.

A line that passes through a layer gets its own cell there, so that it never crosses a box. Lines from the same job
share a path until they diverge. The layout depends only on the definition: the same DAG always gives the same drawing.

It is written here because the usual layout engine, Graphviz, is a program that every user would have to install, and
because the drawing as text needs the same layers in the width of a terminal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from interlock.dags.definition import Dag, Input, Job, JobOutput, SourceKind
from interlock.dags.lineage import producer

SWEEPS: Final = 8


class Kind(StrEnum):
    JOB = "job"
    SOURCE = "source"
    DATASET = "dataset"
    """A dataset that another DAG publishes."""


@dataclass(frozen=True, slots=True)
class Box:
    key: str
    kind: Kind
    title: str
    details: tuple[str, ...]
    published: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """A line between two boxes, with the outputs that it represents."""

    start: str
    end: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    title: str
    boxes: dict[str, Box]
    lines: tuple[Line, ...]


def graph_of(dag: Dag) -> Graph:
    published: dict[str, list[str]] = defaultdict(list)
    for name, publication in sorted(dag.publish.items()):
        published[publication.from_.job].append(name)
    boxes = {box.key: box for box in _foreign(dag)}
    boxes |= {_job_key(job.name): _job_box(job, published[job.name]) for job in dag.jobs}
    return Graph(dag.name, boxes, tuple(_lines(dag)))


def _job_key(name: str) -> str:
    return f"job {name}"


def _job_box(job: Job, published: list[str]) -> Box:
    details = [job.operator, job.runtime]
    if job.source is None:
        return Box(_job_key(job.name), Kind.JOB, job.name, tuple(details), tuple(published))
    begins = job.source.schedule if job.source.kind is SourceKind.CRON else None
    details.append(f"{job.source.kind} {begins}" if begins else str(job.source.kind))
    return Box(_job_key(job.name), Kind.SOURCE, job.name, tuple(details), tuple(published))


def _foreign(dag: Dag) -> Iterable[Box]:
    for job in dag.jobs:
        for edge in job.inputs:
            if producer(dag, edge) is None:
                start, output = _origin(dag, edge)
                yield Box(start, Kind.DATASET, output, ("another DAG's",))


def _lines(dag: Dag) -> Iterable[Line]:
    for job in dag.jobs:
        outputs: dict[str, list[str]] = defaultdict(list)
        for edge in job.inputs:
            start, output = _origin(dag, edge)
            outputs[start].append(output)
        for start, names in outputs.items():
            yield Line(start, _job_key(job.name), tuple(dict.fromkeys(names)))


def _origin(dag: Dag, edge: Input) -> tuple[str, str]:
    """Returns the box that an input comes from, and the name of the output or dataset."""
    source = producer(dag, edge)
    if source is not None:
        return _job_key(source.job), source.output
    name = edge.from_.output if isinstance(edge.from_, JobOutput) else edge.from_.dataset
    return f"dataset {name}", name


# Layers


@dataclass(frozen=True, slots=True)
class Cell:
    """A position in a layer: a box, or the path of the lines that come from the box `key` above."""

    key: str
    layer: int
    passage: bool = False


@dataclass(frozen=True, slots=True)
class Layers:
    rows: list[list[Cell]]
    followers: dict[Cell, list[Cell]]
    """Connected cells of the next layer, in that layer's order."""
    leaders: dict[Cell, list[Cell]]
    """Connected cells of the previous layer, in that layer's order."""


def layered(graph: Graph, max_per_row: int) -> Layers:
    depth = _depths(graph, max_per_row)
    rows: list[list[Cell]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for key in graph.boxes:
        rows[depth[key]].append(Cell(key, depth[key]))
    followers: dict[Cell, list[Cell]] = defaultdict(list)
    for key, ends in _ends(graph).items():
        _connect(key, depth, ends, rows, followers)
    return _ordered(rows, followers)


def _ends(graph: Graph) -> dict[str, list[str]]:
    ends: dict[str, list[str]] = {key: [] for key in graph.boxes}
    for line in graph.lines:
        ends[line.start].append(line.end)
    return ends


def _depths(graph: Graph, max_per_row: int) -> dict[str, int]:
    """Puts each box as high as its inputs allow, and lower where a row is full."""
    ends = _ends(graph)
    waiting = dict.fromkeys(graph.boxes, 0)
    for line in graph.lines:
        waiting[line.end] += 1
    ready = [key for key, count in waiting.items() if not count]
    least = dict.fromkeys(graph.boxes, 0)
    depth: dict[str, int] = {}
    taken: dict[int, int] = defaultdict(int)
    for key in ready:  # grows during the iteration: a box is ready once all boxes before it have a depth
        depth[key] = least[key]
        while taken[depth[key]] >= max_per_row:
            depth[key] += 1
        taken[depth[key]] += 1
        for end in ends[key]:
            least[end] = max(least[end], depth[key] + 1)
            waiting[end] -= 1
            if not waiting[end]:
                ready.append(end)
    return _without_gaps(depth)


def _without_gaps(depth: dict[str, int]) -> dict[str, int]:
    number = {layer: index for index, layer in enumerate(sorted(set(depth.values())))}
    return {key: number[layer] for key, layer in depth.items()}


def _connect(
    key: str, depth: Mapping[str, int], ends: list[str], rows: list[list[Cell]], followers: dict[Cell, list[Cell]]
) -> None:
    """Connects a box to all of its consumers, through a passage in each layer in between."""
    last = max((depth[end] for end in ends), default=0)
    cell = Cell(key, depth[key])
    for layer in range(depth[key] + 1, last + 1):
        followers[cell].extend(Cell(end, layer) for end in ends if depth[end] == layer)
        if layer < last:
            passage = Cell(key, layer, passage=True)
            rows[layer].append(passage)
            followers[cell].append(passage)
            cell = passage


def _ordered(rows: list[list[Cell]], followers: dict[Cell, list[Cell]]) -> Layers:
    """Moves each cell near the mean position of its neighbours, down and up in turn, to reduce crossings."""
    leaders: dict[Cell, list[Cell]] = defaultdict(list)
    for start, ends in followers.items():
        for end in ends:
            leaders[end].append(start)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for index in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            beside = rows[index - 1 if down else index + 1]
            rows[index] = _by_middle(rows[index], beside, leaders if down else followers)
    order = {cell: index for row in rows for index, cell in enumerate(row)}
    return Layers(rows, _sorted(followers, order), _sorted(leaders, order))


def _by_middle(row: list[Cell], beside: list[Cell], connected: Mapping[Cell, list[Cell]]) -> list[Cell]:
    position = {cell: index for index, cell in enumerate(beside)}
    middles = []
    for index, cell in enumerate(row):
        found = [position[other] for other in connected.get(cell, [])]
        middles.append((sum(found) / len(found) if found else float(index), index, cell))
    return [cell for _, _, cell in sorted(middles, key=lambda middle: middle[:2])]


def _sorted(connected: Mapping[Cell, list[Cell]], order: Mapping[Cell, int]) -> dict[Cell, list[Cell]]:
    return {cell: sorted(others, key=lambda other: order[other]) for cell, others in connected.items()}


# Positions within a layer


def spread(wanted: Sequence[float], sizes: Sequence[int], gap: int) -> list[float]:
    """Returns centres as close to the wanted ones as the order and the sizes allow.

    Neighbours that would overlap form a block around the mean of their wanted centres (pool adjacent violators).
    """
    offsets = _offsets(sizes, gap)
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        mean, count = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, members = blocks.pop()
            mean, count = (before * members + mean * count) / (members + count), members + count
        blocks.append((mean, count))
    starts = [mean for mean, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def _offsets(sizes: Sequence[int], gap: int) -> list[float]:
    """Returns the centres when all boxes are packed from 0 on."""
    offsets, edge = [], 0.0
    for size in sizes:
        offsets.append(edge + size / 2)
        edge += size + gap
    return offsets


def centres(layers: Layers, size: Mapping[Cell, int], gap: int, sweeps: int = SWEEPS) -> dict[Cell, float]:
    """Returns positions of cells within their layers that keep lines straight. Without sweeps, cells are packed."""
    place: dict[Cell, float] = {}
    for row in layers.rows:
        place |= zip(row, _offsets([size[cell] for cell in row], gap), strict=True)
    for sweep in range(sweeps):
        down = sweep % 2 == 0
        connected = layers.leaders if down else layers.followers
        for row in layers.rows if down else reversed(layers.rows):
            wanted = [_mean([place[other] for other in connected.get(cell, [])], place[cell]) for cell in row]
            place |= zip(row, spread(wanted, [size[cell] for cell in row], gap), strict=True)
    return place


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
