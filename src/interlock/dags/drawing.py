"""Draws a DAG: as one self-contained SVG file with light and dark styles, or as text in the width of a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from typing import Final

from interlock.dags.definition import Dag
from interlock.dags.graph import SWEEPS, Box, Cell, Graph, Kind, Layers, centres, graph_of, layered

_MAX_PER_COLUMN: Final = 40
_LONGEST_TEXT: Final = 28
_LONGEST_LABEL: Final = 12
_LEVEL: Final = 92
"""Last stretch of a line, reserved for its label: no neighbouring curve enters it."""
_LETTER: Final = 7.3
"""Width of a character at 12 px. Names are ASCII, and the font is monospaced."""
_LINE, _PAD, _TAG = 17, 12, 20
_GAP_Y: Final = 26
_GAP_X: Final = 170
_PASSAGE: Final = 6
_MARGIN: Final = 24
_HEAD: Final = 46
_FOOT: Final = 40
_ARROW: Final = 7

_STYLE: Final = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #57606a; }
.page { fill: #ffffff; }
.heading { font-size: 16px; font-weight: 700; fill: #1f2328; }
.title { font-weight: 700; fill: #1f2328; }
.label { font-size: 11px; }
.box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.2; }
.source .box { fill: #ddf4ff; stroke: #0969da; }
.dataset .box { fill: #ffffff; stroke-dasharray: 4 3; }
.bar { fill: #0969da; }
.tag { fill: #dafbe1; stroke: #1a7f37; }
.tagged { fill: #116329; }
.line { fill: none; stroke: #8c959f; stroke-width: 1.4; }
.tip { fill: #8c959f; }
@media (prefers-color-scheme: dark) {
  text { fill: #9da7b3; }
  .page { fill: #0d1117; }
  .heading, .title { fill: #e6edf3; }
  .box { fill: #161b22; stroke: #6e7681; }
  .source .box { fill: #0c2d6b; stroke: #58a6ff; }
  .dataset .box { fill: #0d1117; }
  .bar { fill: #58a6ff; }
  .tag { fill: #033a16; stroke: #3fb950; }
  .tagged { fill: #7ee787; }
  .line { stroke: #6e7681; }
  .tip { fill: #6e7681; }
}
"""


def draw_svg(dag: Dag) -> str:
    drawing = _Drawing(graph_of(dag))
    return "\n".join(drawing.document()) + "\n"


def _cut(text: str, length: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _height(box: Box) -> int:
    return 2 * _PAD + _LINE * (1 + len(box.details)) + (_TAG + 4) * len(box.published)


def _width(box: Box) -> int:
    texts = [box.title, *box.details, *(f"  {name}" for name in box.published)]
    return round(max(len(_cut(text)) for text in texts) * _LETTER) + 2 * _PAD + 4


class _Drawing:
    """Computes the layout, then yields the elements. Lines come first, so that boxes are drawn on top."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._layers = layered(graph, _MAX_PER_COLUMN)
        size = {cell: self._size(cell) for row in self._layers.rows for cell in row}
        middle = centres(self._layers, size, _GAP_Y)
        top = min((middle[cell] - size[cell] / 2 for cell in middle), default=0.0)
        self._y = {cell: round(middle[cell] - top + _HEAD) for cell in middle}
        self._x, edge = {}, _MARGIN
        self._widths = [self._layer_width(row) for row in self._layers.rows]
        for index, width in enumerate(self._widths):
            self._x[index] = edge
            edge += width + _GAP_X
        legend = sum(self._legend_width(text) for _, text in self._legend_entries())
        self._width = max(edge - _GAP_X, legend + _MARGIN, round(len(graph.title) * 10) + _MARGIN) + _MARGIN
        bottom = max((self._y[cell] + size[cell] / 2 for cell in middle), default=_HEAD)
        self._height = round(bottom) + _FOOT + _MARGIN

    def _size(self, cell: Cell) -> int:
        return _PASSAGE if cell.passage else _height(self._graph.boxes[cell.key])

    def _layer_width(self, row: list[Cell]) -> int:
        return max(_width(self._graph.boxes[cell.key]) for cell in row if not cell.passage)

    # Elements

    def document(self) -> Iterator[str]:
        title = escape(self._graph.title)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height}" '
            f'viewBox="0 0 {self._width} {self._height}" role="img" aria-label="DAG {title}">'
        )
        yield f"<title>DAG {title}</title>"
        yield f"<style>{_STYLE}</style>"
        yield f'<rect class="page" width="{self._width}" height="{self._height}"/>'
        yield f'<text class="heading" x="{_MARGIN}" y="{_MARGIN + 6}">{title}</text>'
        yield from self._lines()
        for row in self._layers.rows:
            for cell in row:
                if not cell.passage:
                    yield from self._box(cell)
        yield from self._legend()
        yield "</svg>"

    def _box(self, cell: Cell) -> Iterator[str]:
        box = self._graph.boxes[cell.key]
        width, height = self._widths[cell.layer], _height(box)
        x, y = self._x[cell.layer], self._y[cell] - height // 2
        yield f'<g class="{box.kind}"><title>{escape("; ".join([box.title, *box.details, *box.published]))}</title>'
        yield f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="{_radius(box)}"/>'
        if box.kind is Kind.SOURCE:
            yield f'<rect class="bar" x="{x}" y="{y + 8}" width="4" height="{height - 16}" rx="2"/>'
        for number, text in enumerate([box.title, *box.details]):
            style = ' class="title"' if number == 0 else ""
            yield f'<text{style} x="{x + _PAD}" y="{y + _PAD + 12 + _LINE * number}">{escape(_cut(text))}</text>'
        below = y + _PAD + _LINE * (1 + len(box.details)) + 4
        for number, name in enumerate(box.published):
            yield from _tag(x + _PAD, below + (_TAG + 4) * number, name)
        yield "</g>"

    def _lines(self) -> Iterator[str]:
        for line in self._graph.lines:
            points = self._way(line.start, line.end)
            outputs = ", ".join(line.outputs)
            yield f'<g><title>{escape(outputs)}</title><path class="line" d="{_path(points)}"/>'
            x, y = points[-1]
            tip = f"M{x} {y}l-{_ARROW + 2} -{_ARROW // 2 + 1}v{_ARROW + 1}z"
            yield f'<path class="tip" d="{tip}"/>'
            label = escape(_cut(outputs, _LONGEST_LABEL))
            yield f'<text class="label" text-anchor="end" x="{x - _ARROW - 5}" y="{y - 5}">{label}</text></g>'

    def _way(self, start: str, end: str) -> list[tuple[int, int]]:
        """Returns the points from the right edge of one box, through the passages, to the left edge of the other."""
        cell = self._cell(start)
        points = [(self._x[cell.layer] + self._widths[cell.layer], self._y[cell])]
        target = self._cell(end)
        for layer in range(cell.layer + 1, target.layer):
            cell = Cell(start, layer, passage=True)
            left = self._x[layer]
            points += [(left - _LEVEL, self._y[cell]), (left + self._widths[layer], self._y[cell])]
        left, port = self._x[target.layer], self._port(cell, target)
        return [*points, (left - _LEVEL, port), (left, port)]

    def _cell(self, key: str) -> Cell:
        return next(cell for row in self._layers.rows for cell in row if cell.key == key and not cell.passage)

    def _port(self, leader: Cell, target: Cell) -> int:
        leaders = self._layers.leaders[target]
        height = _height(self._graph.boxes[target.key])
        step = height / (len(leaders) + 1)
        return round(self._y[target] - height / 2 + step * (leaders.index(leader) + 1))

    # Legend

    def _legend_entries(self) -> list[tuple[str, str]]:
        boxes = self._graph.boxes.values()
        return [
            *([("source", "source")] if any(box.kind is Kind.SOURCE for box in boxes) else []),
            *([("published", "published dataset")] if any(box.published for box in boxes) else []),
            *([("dataset", "dataset of another DAG")] if any(box.kind is Kind.DATASET for box in boxes) else []),
        ]

    def _legend_width(self, text: str) -> int:
        return round(len(text) * 6.8) + 44

    def _legend(self) -> Iterator[str]:
        x, y = _MARGIN, self._height - _MARGIN
        for kind, text in self._legend_entries():
            swatch = "tag" if kind == "published" else "box"
            mark = f'<rect class="{swatch}" x="{x}" y="{y - 10}" width="18" height="12" rx="3"/>'
            yield f'<g class="{kind}">{mark}<text class="label" x="{x + 24}" y="{y}">{text}</text></g>'
            x += self._legend_width(text)


def _radius(box: Box) -> int:
    return 16 if box.kind is Kind.DATASET else 6


def _tag(x: int, y: int, name: str) -> Iterator[str]:
    text = _cut(name, _LONGEST_TEXT - 2)
    width = round(len(text) * _LETTER) + 14
    yield f'<rect class="tag" x="{x}" y="{y}" width="{width}" height="{_TAG}" rx="{_TAG // 2}"/>'
    yield f'<text class="tagged" x="{x + 7}" y="{y + 14}">{escape(text)}</text>'


def _path(points: Iterable[tuple[int, int]]) -> str:
    """Builds a path that is horizontal at every point: curved between layers, straight along passages and labels."""
    (x, y), *rest = points
    parts = [f"M{x} {y}"]
    for next_x, next_y in rest:
        middle = (x + next_x) // 2
        curve = f"C{middle} {y} {middle} {next_y} {next_x} {next_y}"
        parts.append(f"H{next_x}" if y == next_y else curve)
        x, y = next_x, next_y
    return "".join(parts)


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


def draw_text(dag: Dag, width: int = WIDTH) -> str:
    """Draws boxes if they fit into the width, else a list, which always fits."""
    graph = graph_of(dag)
    limit = max(1, width // _NARROWEST)
    layers = layered(graph, limit)
    for length, packed in itertools.product(_NAME_LENGTHS, (False, True)):
        drawing = _TextDrawing(graph, layers, length, packed=packed)
        if drawing.width <= width:
            return _page(graph, width, [*drawing.rows(), "", *_legend(graph, width)])
    return _page(graph, width, _listed(graph, width))


def _page(graph: Graph, width: int, rows: list[str]) -> str:
    return "\n".join([_shorten(graph.title, width), "", *rows]).rstrip() + "\n"


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


def _shorten(text: str, length: int) -> str:
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


class _TextDrawing:
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
            canvas.put(top + 1 + number, left, f"│ {_shorten(text, self._length):<{size - 4}} │")
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
    lines = [_shorten(f"{head}  ({', '.join(details)})", width)]
    incoming = [line for line in graph.lines if line.end == box.key]
    inputs = [f"  ◀ {graph.boxes[line.start].title}: {', '.join(line.outputs)}" for line in incoming]
    return lines + [_shorten(line, width) for line in inputs]
