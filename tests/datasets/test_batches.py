"""Fast reading of batches, alone or together: the same rows and refusals as reading line by line."""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from interlock.datasets.buffers import batch
from interlock.datasets.buffers.batch import BadBatch, Batch, Source
from interlock.datasets.buffers.shape import Shape
from interlock.schemas import Column

COLUMNS = {
    "id": "bigint",
    "small": "smallint",
    "name": "string",
    "exact": "decimal(38,4)",
    "ratio": "double",
    "good": "boolean",
    "day": "date",
    "at": "timestamp",
    "raw": "binary",
}
SHAPE = Shape(tuple(Column(name, kind, nullable=name != "id") for name, kind in COLUMNS.items()), ("id",), update=True)
FIRST_STAYS = Shape(SHAPE.columns, ("id",), update=False)

scalars = st.sampled_from(
    ["0", "-0", "01", "1", "1.0", "1.5", "1e2", "1E400", "-1", "+1", ".5", "1.", "32768", "9223372036854775807",
     "9223372036854775808", "99999999999999999999999999999999999999.9", "0.00001", "null", "true", "false", "NaN",
     "Infinity", "nul", '""', '"1"', '"a"', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"\u20ac"', '"{"', '"}\\n{"',
     '"\t"', '"2024-02-29"', '"2023-02-29"', '"2024-02-29T12:00:00Z"', '"2024-02-29T12:00:00"',
     '"2024-02-29T12:00:00.1234567Z"', '"0x00fF"', '"0x0"', '"00"', "{}", '{"a":1}', "[]", "[1]", "{", "}", ""]
)  # fmt: skip
fields = st.tuples(st.sampled_from([*COLUMNS, "org_id", "ID", ""]), scalars).map(lambda pair: f'"{pair[0]}":{pair[1]}')
objects = st.lists(fields, max_size=3).map(lambda found: "{" + ",".join(['"id":1', *found]) + "}")
pieces = st.sampled_from(
    ['{"id":1}', '{"id":2,"name":"b"}', '{"id":', '1}{"id":2}', '{"id":1}{"id":2}', '{"id":1,', '"name":"a"}', "{}",
     "1", '{"id":1,"name":"', '{"}', '{"a":1}', "[]", "", " ", "\t", '{"id":1} ', ' {"id":1}', '{"id":1},', "\ufeff",
     '\ufeff{"id":1}', "\x00", "#", "{", "}", '{"id":1,"id":2}', '{"name":"a"}', '{"id":1,"name":"\r"}', "\x0b",
     "\x85", "\u2028"]
)  # fmt: skip
ends = st.sampled_from(["\n", "\r\n", "\n\n", "\r", " \n"])
texts = st.lists(st.tuples(pieces | objects, ends), max_size=6).flatmap(
    lambda lines: st.sampled_from(["", "\n"]).map(
        lambda last: "".join(line + end for line, end in lines[:-1]) + "".join(line for line, _ in lines[-1:]) + last
    )
)
contents = st.one_of(texts.map(str.encode), texts.map(lambda text: text.encode("utf-16")), st.binary(max_size=20))


def by_lines(content: bytes) -> list[dict[str, object]] | None:
    """Returns the rows line by line, or None if a line is not a row."""
    rows: list[dict[str, object]] = []
    for number, line in enumerate(content.split(b"\n")):
        text = (line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line).strip()
        if text:
            table = batch._of_lines([text], SHAPE)
            if table is None:
                return None
            rows += table.to_pylist()
    return rows


def outcome(read: Batch | BadBatch) -> object:
    return read.refusal if isinstance(read, BadBatch) else (read.table.to_pylist(), [*_lines(read)])


def _lines(read: Batch) -> list[int]:
    return [read.line(row) for row in range(read.table.num_rows)]


def alone(content: bytes | Path, count: int, shape: Shape) -> Batch | BadBatch:
    try:
        return batch.read(content, "b.jsonl", shape, count)
    except BadBatch as bad:
        return bad


def count_of(content: bytes) -> int:
    return len([line for line in content.split(b"\n") if line.strip()])


@given(content=contents)
@example(content=b'{"id":\n1}{"id":2}\n')
@example(content=b'{"id":1,\n"name":"a"}\n{"id":2}{"id":3}')
@example(content=b'{"id":1,"name":"\n{"}{"id":2}')
@example(content=b'{"id":1,"name":\n{"a":1}}')
@example(content=b'{"id":1}\r\n{"id":2}\r\n')
@example(content=b'\xef\xbb\xbf{"id":1}\n\n{"id":2}')
@example(content=b'{"id":1}\n\xff{"id":2}')
def test_batch_reads_like_its_lines_one_by_one(content: bytes) -> None:
    read = alone(content, count_of(content), SHAPE)
    rows = by_lines(content)
    if isinstance(read, Batch):
        assert read.table.to_pylist() == rows
    elif read.refusal.code == "bad_rows":
        assert rows is None
    else:
        assert read.refusal.code in ("bad_encoding", "record_count")


@given(content=contents)
def test_batch_in_file_reads_like_batch_in_memory(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "b"
        path.write_bytes(content)
        in_a_file = alone(path, count_of(content), SHAPE)
    assert outcome(in_a_file) == outcome(alone(content, count_of(content), SHAPE))


@given(
    published=st.lists(st.tuples(contents, st.sampled_from([0, 0, 0, 1, -1])), max_size=5),
    shape=st.sampled_from([SHAPE, FIRST_STAYS]),
)
@example(published=[(b'{"id":1', 0), (b',"name":"a"}{"id":2}', 0)], shape=SHAPE)
@example(published=[(b'{"id":1}\n{"id":2}', 0), (b'{"id":2}\n{"id":3}\n', 0)], shape=FIRST_STAYS)
@example(published=[(b'{"id":1}\n{"id":1}', 0), (b'{"id":2}\n', 0)], shape=FIRST_STAYS)
@example(published=[(b'{"id":1}', 1), (b'{"id":2}\n{"id":3}', -1)], shape=SHAPE)
@example(published=[(b"", 0), (b'{"id":1}', 0)], shape=SHAPE)
def test_batches_read_together_equal_batches_read_alone(published: list[tuple[bytes, int]], shape: Shape) -> None:
    """The number in each pair is the error of the published record count."""
    counts = [max(0, count_of(content) + wrong) for content, wrong in published]
    sources = [Source(content, "b.jsonl", count) for (content, _), count in zip(published, counts, strict=True)]
    found = batch.read_all(sources, shape)
    expected = [alone(content, count, shape) for (content, _), count in zip(published, counts, strict=True)]
    assert [outcome(each) for each in found] == [outcome(each) for each in expected]


@pytest.mark.parametrize("name", ["b.parquet", "B.PARQUET"])
def test_json_lines_named_parquet_are_refused_among_others(name: str) -> None:
    good, bad = batch.read_all([Source(b'{"id":1}', "b.jsonl", 1), Source(b'{"id":1}', name, 1)], SHAPE)
    assert isinstance(good, Batch)
    assert isinstance(bad, BadBatch)
    assert bad.refusal.code == "truncated"


@pytest.mark.parametrize("in_a_file", [False, True])
def test_parquet_footer_beyond_its_bound_is_refused_before_it_is_parsed(tmp_path: Path, in_a_file: bool) -> None:
    """The same file with a smaller footer is a good batch."""

    def source(footer_bytes: int) -> bytes | Path:
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False)], metadata={"k": "x" * footer_bytes})
        written = io.BytesIO()
        pq.write_table(pa.table({"id": [1]}, schema=schema), written)
        path = tmp_path / str(footer_bytes)
        path.write_bytes(written.getvalue())
        return path if in_a_file else written.getvalue()

    shape = Shape(SHAPE.columns[:1], ("id",), update=True)
    assert batch.read(source(1 << 10), "b.parquet", shape, 1).table.to_pylist() == [{"id": 1}]
    with pytest.raises(BadBatch, match="footer of the batch has") as refused:
        batch.read(source(5 << 20), "b.parquet", shape, 1)
    assert refused.value.refusal.code == "too_large"


def test_lines_are_counted_across_scanned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"".join(b'{"id":%d}\n' % number for number in range(20))
    for size in range(1, 20):
        monkeypatch.setattr(batch, "_LOOKED_THROUGH_BYTES", size)
        assert batch._plain_lines(content) == 20
        assert batch._plain_lines(content + b" ") is None
