"""Draws a DAG on a terminal: boxes from top to bottom with lines between them, in a given width."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from interlock.dags.definition import Dag
from interlock.dags.graph import SWEEPS, Box, Cell, Graph, Kind, Layers, centres, graph_of, layered

WIDTH: Final = 80
_GAP: Final = 2
_NAME_LENGTHS: Final = (32, 24, 18, 14, 11, 8)
"""Maximum lengths of names, tried in this order until the drawing fits the width."""
_JOG: Final = 3
_NARROWEST: Final = _NAME_LENGTHS[-1] + 5 + _GAP

_LEFT, _RIGHT, _UP, _DOWN = 1, 2, 4, 8
_GLYPHS: Final = {
    _LEFT | _RIGHT: "─",
    _LEFT | _UP: "╯",
    _RIGHT | _UP: "╰",
    _LEFT | _DOWN: "╮",
    _RIGHT | _DOWN: "╭",
    _LEFT | _RIGHT | _UP: "┴",
    _LEFT | _RIGHT | _DOWN: "┬",
    _LEFT | _UP | _DOWN: "┤",
    _RIGHT | _UP | _DOWN: "├",
    _LEFT | _RIGHT | _UP | _DOWN: "┼",
}
_CORNERS: Final = {Kind.JOB: "┌┐└┘", Kind.SOURCE: "┌┐└┘", Kind.DATASET: "╭╮╰╯"}
_SOURCE, _PUBLISHED = "◆ ", "⇒ "


def draw(dag: Dag, width: int = WIDTH) -> str:
    """Draws boxes if they fit into the width, else a list, which always fits."""
    graph = graph_of(dag)
    limit = max(1, width // _NARROWEST)
    layers = layered(graph, limit)
    for length, packed in itertools.product(_NAME_LENGTHS, (False, True)):
        drawing = _Drawing(graph, layers, length, packed=packed)
        if drawing.width <= width:
            return _page(graph, width, [*drawing.rows(), "", *_legend(graph, width)])
    return _page(graph, width, _listed(graph, width))


def _page(graph: Graph, width: int, rows: list[str]) -> str:
    return "\n".join([_cut(graph.title, width), "", *rows]).rstrip() + "\n"


def _legend(graph: Graph, width: int) -> list[str]:
    boxes = graph.boxes.values()
    parts = []
    if any(box.kind is Kind.SOURCE for box in boxes):
        parts.append(f"{_SOURCE}source")
    if any(box.published for box in boxes):
        parts.append(f"{_PUBLISHED}published as")
    if any(box.kind is Kind.DATASET for box in boxes):
        parts.append("╭╮ dataset of another DAG")
    return ["   ".join(parts)[:width]] if parts else []


def _texts(box: Box) -> list[str]:
    mark = _SOURCE if box.kind is Kind.SOURCE else ""
    return [mark + box.title, *box.details, *(_PUBLISHED + name for name in box.published)]


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(slots=True)
class _Net:
    """The lines from one cell to cells of the next layer: they leave as one line and branch below."""

    start: int
    ends: dict[int, bool]
    """Target columns; True if the line ends at a box there."""

    @property
    def straight(self) -> bool:
        return list(self.ends) == [self.start]

    @property
    def span(self) -> tuple[int, int]:
        return min(self.start, *self.ends), max(self.start, *self.ends)


@dataclass(slots=True)
class _Canvas:
    lines: list[list[str]] = field(default_factory=list)

    def put(self, row: int, column: int, text: str) -> None:
        while len(self.lines) <= row:
            self.lines.append([])
        line = self.lines[row]
        line.extend(" " * (column + len(text) - len(line)))
        line[column : column + len(text)] = text

    def rows(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]


class _Drawing:
    """Assigns columns to all cells, then draws layer by layer: the boxes, and the channel to the next layer."""

    def __init__(self, graph: Graph, layers: Layers, length: int, *, packed: bool) -> None:
        self._graph = graph
        self._layers = layers
        self._length = length
        cells = [cell for row in layers.rows for cell in row]
        self._size = {cell: self._width_of(cell) for cell in cells}
        self._left = self._columns(centres(layers, self._size, _GAP, sweeps=0 if packed else SWEEPS))
        self.width = max((self._left[cell] + self._size[cell] for cell in cells), default=0)

    def _width_of(self, cell: Cell) -> int:
        if cell.passage:
            return 1
        longest = max(len(text) for text in _texts(self._graph.boxes[cell.key]))
        ports = 2 * len(self._layers.leaders.get(cell, [])) - 1
        # Odd, so that the box has a middle column.
        return (max(min(longest, self._length), ports) + 4) | 1

    # Columns

    def _columns(self, centre: dict[Cell, float]) -> dict[Cell, int]:
        left: dict[Cell, int] = {}
        for row in self._layers.rows:
            edge: int | None = None
            for cell in row:
                column = self._below(cell, round(centre[cell] - self._size[cell] / 2), left)
                column = column if edge is None else max(column, edge)
                left[cell] = self._free(cell, column, left)
                edge = left[cell] + self._size[cell] + _GAP
        first = min(left.values(), default=0)
        return {cell: column - first for cell, column in left.items()}

    def _below(self, cell: Cell, column: int, left: dict[Cell, int]) -> int:
        """Aligns a cell with its only leader if that is near: a line with a jog of one column looks like a mistake."""
        leaders = self._layers.leaders.get(cell, [])
        if len(leaders) != 1:
            return column
        straight = self._middle(leaders[0], left[leaders[0]]) - self._size[cell] // 2
        return straight if abs(straight - column) <= _JOG else column

    def _free(self, cell: Cell, column: int, left: dict[Cell, int]) -> int:
        """Returns the next column where no line into this cell overlaps a line that leaves another cell above."""
        if cell.layer == 0:
            return column
        leaving = {self._middle(above, left[above]): above for above in self._layers.rows[cell.layer - 1]}
        while any(leaving.get(port, leader) != leader for leader, port in self._ports(cell, column).items()):
            column += 1
        return column

    def _middle(self, cell: Cell, left: int) -> int:
        return left + self._size[cell] // 2

    def _ports(self, cell: Cell, left: int) -> dict[Cell, int]:
        """Returns the columns where lines from above enter, a separate one for each."""
        leaders = self._layers.leaders.get(cell, [])
        first = self._middle(cell, left) - (len(leaders) - 1)
        return {leader: first + 2 * index for index, leader in enumerate(leaders)}

    # Rows

    def rows(self) -> list[str]:
        canvas = _Canvas()
        top = 0
        for row in self._layers.rows:
            height = 2 + max(len(_texts(self._graph.boxes[cell.key])) for cell in row if not cell.passage)
            for cell in row:
                self._cell(canvas, cell, top, height)
            top += height
            top += self._channel(canvas, row, top)
        return canvas.rows()

    def _cell(self, canvas: _Canvas, cell: Cell, top: int, height: int) -> None:
        left, size = self._left[cell], self._size[cell]
        if cell.passage:
            for row in range(top, top + height):
                canvas.put(row, left, "│")
            return
        box = self._graph.boxes[cell.key]
        corners = _CORNERS[box.kind]
        canvas.put(top, left, corners[0] + "─" * (size - 2) + corners[1])
        texts = _texts(box)
        for number in range(height - 2):
            text = texts[number] if number < len(texts) else ""
            canvas.put(top + 1 + number, left, f"│ {_cut(text, self._length):<{size - 4}} │")
        canvas.put(top + height - 1, left, corners[2] + "─" * (size - 2) + corners[3])
        if cell in self._layers.followers:
            canvas.put(top + height - 1, self._middle(cell, left), "┬")

    def _channel(self, canvas: _Canvas, row: list[Cell], top: int) -> int:
        """Draws the lines below a layer, and returns the number of rows they take."""
        nets = [self._net(cell) for cell in row if cell in self._layers.followers]
        if not nets:
            return 0
        tracks = _tracks(net for net in nets if not net.straight)
        bottom = top + (max(tracks.values(), default=-1) + 1)
        for net in nets:
            if not net.straight:
                _across(canvas, net, top + tracks[net.start])
        # Vertical lines last: at a crossing, the vertical line is drawn through.
        for net in nets:
            _down(canvas, net, top, tracks.get(net.start), bottom)
        return bottom - top + 1

    def _net(self, cell: Cell) -> _Net:
        ends = self._layers.followers[cell]
        columns = {self._ports(end, self._left[end])[cell]: not end.passage for end in ends}
        return _Net(self._middle(cell, self._left[cell]), columns)


def _tracks(nets: Iterable[_Net]) -> dict[int, int]:
    """Assigns each net a row of the channel, by its start column. Nets that do not overlap may share a row."""
    free_from: list[int] = []
    tracks: dict[int, int] = {}
    for net in sorted(nets, key=lambda net: net.span):
        first, last = net.span
        track = next((index for index, column in enumerate(free_from) if column < first), len(free_from))
        free_from[track : track + 1] = [last + 1]
        tracks[net.start] = track
    return tracks


def _across(canvas: _Canvas, net: _Net, row: int) -> None:
    first, last = net.span
    for column in range(first, last + 1):
        ways = (column > first) * _LEFT | (column < last) * _RIGHT
        ways |= (column == net.start) * _UP | (column in net.ends) * _DOWN
        canvas.put(row, column, _GLYPHS[ways])


def _down(canvas: _Canvas, net: _Net, top: int, track: int | None, bottom: int) -> None:
    if track is not None:
        for row in range(top, top + track):
            canvas.put(row, net.start, "│")
    for column, reaches_box in net.ends.items():
        for row in range(top if track is None else top + track + 1, bottom):
            canvas.put(row, column, "│")
        canvas.put(bottom, column, "▼" if reaches_box else "│")


# List fallback


def _listed(graph: Graph, width: int) -> list[str]:
    """Lists boxes with their inputs, in topological order, for graphs that are too wide to draw."""
    lines = []
    for row in layered(graph, len(graph.boxes)).rows:
        for cell in row:
            if not cell.passage:
                lines += _listing(graph, graph.boxes[cell.key], width)
    return lines


def _listing(graph: Graph, box: Box, width: int) -> list[str]:
    head, *details = _texts(box)
    lines = [_cut(f"{head}  ({', '.join(details)})", width)]
    incoming = [line for line in graph.lines if line.end == box.key]
    return lines + [_cut(f"  ◀ {graph.boxes[line.start].title}: {', '.join(line.outputs)}", width) for line in incoming]
