"""The process's side of lanes: requests data from the engine over inherited sockets."""

from __future__ import annotations

import io
import os
import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow import fs

from interlock.query.statement.protocol import ANSWER, ASK, READ, SCAN, SCAN_END, LaneFiles, receive_exactly

_MAX_READ: Final = 64 << 20


class StoreAway(Exception):
    """Raised when the engine could not read the requested data; the engine knows the reason."""


class Lanes:
    """A pool of lanes; the number of lanes limits concurrent requests."""

    def __init__(self, descriptors: list[int]) -> None:
        self._free: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for descriptor in descriptors:
            self._free.put(socket.socket(fileno=descriptor))
        self.broke = False

    @contextmanager
    def _taken(self) -> Iterator[socket.socket]:
        lane = self._free.get()
        try:
            yield lane
        except (EOFError, OSError) as error:
            self.broke = True
            raise StoreAway("the engine does not respond") from error
        finally:
            self._free.put(lane)

    def read(self, number: int, offset: int, length: int) -> bytes:
        with self._taken() as lane:
            lane.sendall(ASK.pack(READ, number, offset, length))
            there, size = ANSWER.unpack(receive_exactly(lane, ANSWER.size))
            if there and size <= length:
                return receive_exactly(lane, size)
        self.broke = True
        raise StoreAway("a file cannot be read")

    def scan(self, number: int) -> BinaryIO:
        with self._taken() as lane:
            lane.sendall(ASK.pack(SCAN, number, 0, 0))
            data, descriptors, _, _ = socket.recv_fds(lane, ANSWER.size, 1)
            if len(data) == ANSWER.size and data[0] and descriptors:
                return os.fdopen(descriptors[0], "rb", buffering=1 << 20)
        self.broke = True
        raise StoreAway("a table cannot be read")


class _LaneFile(io.RawIOBase):
    def __init__(self, lanes: Lanes, number: int, size: int) -> None:
        self._lanes, self._number, self._size, self._at = lanes, number, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        wanted = min(size if size >= 0 else self._size, self._size - self._at)
        parts: list[bytes] = []
        while wanted > 0:
            part = self._lanes.read(self._number, self._at, min(wanted, _MAX_READ))
            if not part:
                raise StoreAway("a file is shorter than expected")
            parts.append(part)
            self._at += len(part)
            wanted -= len(part)
        return b"".join(parts)


class _LaneFileSystem(fs.FileSystemHandler):  # type: ignore[misc]  # pyarrow has no types
    """Read-only files by number. Names that are not the number of a granted file do not exist."""

    def __init__(self, lanes: Lanes, sizes: dict[int, int]) -> None:
        self._lanes, self._sizes = lanes, sizes

    def get_type_name(self) -> str:
        return "lanes"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[Any]:
        return [fs.FileInfo(path, fs.FileType.File, size=self._sizes[int(path)]) for path in paths]

    def open_input_file(self, path: str) -> Any:
        number = int(path)
        return pa.PythonFile(_LaneFile(self._lanes, number, self._sizes[number]), mode="r")

    open_input_stream = open_input_file

    def _none(self, *_: object, **__: object) -> Any:
        raise PermissionError("only granted files can be read, and no file can be written")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _none
    delete_file = move = copy_file = open_output_stream = open_append_stream = _none


def dataset(lanes: Lanes, source: LaneFiles) -> Any:
    """Returns a pyarrow Dataset. DuckDB passes it the columns and conditions of a scan."""
    system = fs.PyFileSystem(_LaneFileSystem(lanes, dict(source.files)))
    paths = [str(number) for number, _ in source.files]
    factory = ds.FileSystemDatasetFactory(system, paths, ds.ParquetFileFormat(), ds.FileSystemFactoryOptions())
    # None inspects all files.
    fragments = 1 if source.uniform else None
    return factory.finish(factory.inspect(fragments=fragments))


class LaneScan:
    """A table of the data database. Each scan is one statement there, and all scans use one snapshot."""

    def __init__(self, lanes: Lanes, number: int, schema: Any) -> None:
        self._lanes, self._number, self._schema = lanes, number, schema

    def __arrow_c_schema__(self) -> Any:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        batches = self._batches(self._lanes.scan(self._number))
        return pa.RecordBatchReader.from_batches(self._schema, batches).__arrow_c_stream__(requested_schema)

    def _batches(self, stream: BinaryIO) -> Iterator[Any]:
        with stream:
            yield from pa.ipc.open_stream(stream)
            if stream.read(1) != SCAN_END:
                self._lanes.broke = True
                raise StoreAway("a scan was truncated")
