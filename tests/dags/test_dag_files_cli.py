"""`interlock dag validate` and `interlock dag graph` on the command line."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from interlock.cli.app import execute
from interlock.dags import drawing
from tests.support.dags import valid

CHAIN = Path(__file__).parents[2] / "examples" / "dags" / "chain.yaml"


@pytest.fixture
def bad(tmp_path: Path) -> str:
    file = tmp_path / "bad.yaml"
    file.write_text("name: bad\njobs:\n  - {name: x, operator: ech, activation: source, source: {kind: manual}}\n")
    return str(file)


def test_valid_file_is_shown_with_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["dag", "validate", str(CHAIN)]) == 0
    assert "DAG chain is valid: 2 jobs, 1 published, sha256 " in capsys.readouterr().out


def test_problems_are_one_per_line_and_other_files_are_still_read(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["dag", "validate", bad, "absent.yaml", str(CHAIN)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == f"{bad}:3:25: operator 'ech' is not a known operator; write echo"
    assert second.startswith("absent.yaml:1:1: the file cannot be read")
    assert "is valid" in third


def test_output_json_lists_files_and_problems(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["dag", "validate", str(CHAIN), bad, "--output", "json"]) == 1
    good, wrong = json.loads(capsys.readouterr().out)
    assert (good["valid"], good["name"], good["problems"], len(good["content_hash"])) == (True, "chain", [], 64)
    assert (wrong["valid"], wrong["content_hash"]) == (False, None)
    assert wrong["problems"][0]["line"] == 3
    assert wrong["problems"][0]["instead"] == "write echo"


def test_own_operator_is_declared_with_an_option(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["dag", "validate", bad, "--operator", "ech"]) == 0


def test_graph_format_follows_the_file_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["dag", "graph", str(CHAIN)]) == 0
    drawn = capsys.readouterr().out
    assert drawn == drawing.draw_text(valid(CHAIN.read_bytes()))
    out = tmp_path / "chain.svg"
    assert execute(["dag", "graph", str(CHAIN), "--out", str(out)]) == 0
    assert out.read_text() == drawing.draw_svg(valid(CHAIN.read_bytes()))
    assert execute(["dag", "graph", str(CHAIN), "--format", "text", "--out", str(out)]) == 0
    assert out.read_text() == drawn


def test_invalid_file_is_not_drawn(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["dag", "graph", bad]) == 1
    printed = capsys.readouterr()
    assert (printed.out, "write echo" in printed.err) == ("", True)


# Drawings

FAN = "name: fan\njobs:\n  - {name: s, activation: source, source: {kind: manual}, operator: echo, outputs: [o]}\n"


def _fan(width: int) -> str:
    edge = "inputs: [{from: {job: s, output: o}}, {from: {dataset: abroad}}]"
    jobs = "".join(f"  - {{name: reader_number_{n}, operator: echo, {edge}, outputs: [o]}}\n" for n in range(width))
    return FAN + jobs + "publish: {last: {from: {job: reader_number_0, output: o}}}\n"


def test_example_is_drawn_with_source_and_published_datasets() -> None:
    drawn = drawing.draw_text(valid(CHAIN.read_bytes()))
    assert "◆ follow" in drawn
    assert "⇒ chain_transfers" in drawn
    assert drawn.index("follow") < drawn.index("▼") < drawn.index("erc20_transfers")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("readers", [1, 3, 8, 60])
def test_drawing_fits_its_width_and_is_deterministic(width: int, readers: int) -> None:
    drawn = drawing.draw_text(valid(_fan(readers)), width)
    assert max(map(len, drawn.splitlines())) <= width
    assert drawn == drawing.draw_text(valid(_fan(readers)), width)
    assert drawn.count("▼") in (0, 2 * readers)


def test_svg_is_well_formed_self_contained_and_names_every_job() -> None:
    drawn = drawing.draw_svg(valid(_fan(5)))
    root = ET.fromstring(drawn)  # noqa: S314 - our own text
    assert root.tag.endswith("svg")
    assert all(f"reader_number_{n}" in drawn for n in range(5))
    assert "prefers-color-scheme: dark" in drawn
    assert [word for word in ("href", "url(", "<script", "@import") if word in drawn] == []
    assert drawn == drawing.draw_svg(valid(_fan(5)))
