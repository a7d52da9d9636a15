"""Draws a DAG as one self-contained SVG file, left to right, with light and dark styles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from interlock.dags.definition import Dag
from interlock.dags.graph import Box, Cell, Graph, Kind, centres, graph_of, layered

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


def draw(dag: Dag) -> str:
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
