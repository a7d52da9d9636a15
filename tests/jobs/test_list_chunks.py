"""Lists compared with a line-by-line model: the same tasks, however the list is split, compressed and resumed."""

from __future__ import annotations

import asyncio
import csv
import gzip
import hashlib
import io
import json
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.client._lists import spans_of
from interlock.jobs import task_rows
from interlock.jobs.run_sources import Batch, Place, StagedPart, StagedSource, part_uri
from interlock.jobs.staged_lists import StagedList
from interlock.jobs.task_rows import BadList, PartReader, Shape, Unpacked, json_strings, task_ids
from interlock.stores.objects import open_objects
from interlock.tasks.shards import run_task_id
from interlock.wire.jobs import ListFormat

T = TypeVar("T")
RUN = UUID("01a1e17a-f32a-7133-9343-d51c9b0d3bc7")
LIMIT = 1000
STRINGS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=10)
VALUES = st.recursive(st.none() | st.integers() | STRINGS, st.lists, max_leaves=3)
ends = st.sampled_from(["\n", "\r\n"])
texts = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\x00"), max_size=30)
packings = st.sampled_from([bytes, gzip.compress, lambda data: pa.Codec("zstd").compress(data, asbytes=True)])


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner() as runner:
        return runner.run(work)


async def staged(folder: Path, form: ListFormat, *parts: bytes, sha256: str | None = None) -> StagedList:
    objects = open_objects(f"file://{folder}")
    prefix = f"{objects.root}/list/"
    known = [await objects.put(part_uri(prefix, number), part) for number, part in enumerate(parts, 1)]
    source = StagedSource(
        upload_id=RUN,
        prefix=prefix,
        format=form,
        sha256=sha256,
        parts=[StagedPart(etag=one.etag, size=one.size) for one in known],
    )
    return StagedList(objects, source, RUN, Shape(form, LIMIT))


async def batches_of(listed: StagedList, place: Place = Place()) -> list[Batch]:  # noqa: B008 - frozen
    batches = [batch async for batch in listed.batches(place)]
    await listed.verify()
    return batches


def tasks_of(batches: list[Batch]) -> dict[int, object]:
    tasks = {}
    for batch in batches:
        for row in batch.table.to_pylist():
            assert row["task_id"] == run_task_id(RUN, row["task_index"]).bytes
            assert row["task_index"] not in tasks
            tasks[row["task_index"]] = json.loads(row["payload"])
    return tasks


def read(form: ListFormat, *parts: bytes, chunk: int = 1 << 20) -> dict[int, object]:
    """Reads from the start, and again from the end of every batch, as after a crash there."""

    async def work(folder: Path) -> dict[int, object]:
        sha256 = hashlib.sha256(b"".join(parts)).hexdigest()
        whole = await batches_of(await staged(folder, form, *parts, sha256=sha256))
        for number, batch in enumerate(whole, 1):
            place = Place(batch.part, batch.end_byte, batch.first_line + batch.lines)
            rest = await batches_of(await staged(folder, form, *parts), place)
            assert tasks_of(whole[:number]) | tasks_of(rest) == tasks_of(whole)
        return tasks_of(whole)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(PartReader, "chunks", lambda self, size=chunk, whole=PartReader.chunks: whole(self, size))
        return run(work(Path(folder)))


@settings(max_examples=40)
@given(
    parts=st.lists(st.lists(st.tuples(VALUES, ends)), min_size=1),
    packing=packings,
    chunk=st.integers(1, 3000),
)
def test_each_json_line_is_a_task_indexed_by_its_line(parts, packing, chunk) -> None:  # type: ignore[no-untyped-def]
    lines = [value for part in parts for value, _ in part]
    content = ["".join(json.dumps(value, ensure_ascii=False) + end for value, end in part).encode() for part in parts]
    assert read(ListFormat.JSONL, *(packing(part) for part in content), chunk=chunk) == dict(enumerate(lines))


@settings(max_examples=40)
@given(lines=st.lists(st.tuples(texts, ends)), last=texts, mark=st.booleans(), chunk=st.integers(1, 3000))
def test_each_text_line_is_a_task_and_blank_lines_only_count(lines, last, mark, chunk) -> None:  # type: ignore[no-untyped-def]
    content = ("\ufeff" if mark else "") + "".join(text + end for text, end in lines) + last
    expected = [text for text, _ in lines] + [last]
    if not mark and expected[0].startswith("\ufeff"):
        expected[0] = expected[0][1:]
    found = read(ListFormat.LINES, content.encode(), chunk=chunk)
    assert found == {index: text for index, text in enumerate(expected) if text}


values = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=20)


@settings(max_examples=40)
@given(
    names=st.lists(st.text('abc," é', min_size=1, max_size=5), min_size=2, max_size=4, unique=True),
    data=st.data(),
    chunk=st.integers(1, 3000),
)
def test_csv_records_are_objects_with_header_names(names, data, chunk) -> None:  # type: ignore[no-untyped-def]
    records = data.draw(st.lists(st.lists(values, min_size=len(names), max_size=len(names)), max_size=20))
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([names, *records])
    found = read(ListFormat.CSV, file.getvalue().encode(), chunk=chunk)
    assert found == {index: dict(zip(names, record, strict=True)) for index, record in enumerate(records)}


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), max_size=20))
def test_texts_become_json_strings(given_texts: list[str]) -> None:
    encoded = json_strings(pa.array(given_texts, pa.string())).to_pylist()
    assert [msgspec.json.decode(one) for one in encoded] == given_texts


def test_task_ids_match_those_of_the_kernel() -> None:
    import numpy as np

    indexes = [0, 1, 9, 10, 99, 10**6, 10**11]
    made = task_ids(RUN, np.array(indexes)).to_pylist()
    assert [UUID(bytes=one) for one in made] == [run_task_id(RUN, index) for index in indexes]


def test_endless_line_is_never_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "list"
    with path.open("wb") as file:
        file.write(b"1\n")
        file.truncate(200 << 20)
    stream = Unpacked(path, 1)
    reader = PartReader(stream, 1, ListFormat.JSONL, line_limit=LIMIT)
    chunks = reader.chunks()
    assert next(chunks) == (0, b"1\n")
    with pytest.raises(task_rows.LineTooLong):
        next(chunks)
    assert stream._stream.tell() <= 2 * task_rows.CHUNK_BYTES
    stream.close()


def test_compressed_zeros_are_unpacked_only_up_to_the_line_limit(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(gzip.compress(b"0" * (64 << 20)))
    stream = Unpacked(path, 1)
    with pytest.raises(task_rows.LineTooLong):
        next(PartReader(stream, 1, ListFormat.JSONL, line_limit=LIMIT).chunks())
    stream.close()


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=50), st.integers(1, 60))
def test_file_is_split_between_lines_without_loss(lines: list[bytes], size: int) -> None:
    content = b"\n".join(lines)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        spans = spans_of(Path(file.name), ListFormat.LINES, size)
    packed = content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd"))
    assert b"".join(content[span.start : span.end] for span in spans) == content
    assert packed or all(content[span.end - 1 : span.end] == b"\n" for span in spans[:-1])


def test_part_shorter_than_the_resume_position_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        await batches_of(await staged(tmp_path, ListFormat.JSONL, b"1\n2\n"), Place(1, 100, 50))

    with pytest.raises(BadList, match="shorter"):
        run(work())
