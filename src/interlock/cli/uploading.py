"""A list on its way to the store: how much of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from interlock.cli.output import console
from interlock.wire import ListFormat

if TYPE_CHECKING:
    from interlock.client import Client
    from interlock.wire import JobRequest, ListSource

_BY_NAME: Final = {".csv": ListFormat.CSV, ".txt": ListFormat.LINES, ".jsonl": ListFormat.JSONL}
_PACKED: Final = (".gz", ".zst", ".zstd")


async def uploaded(
    client: Client, request: JobRequest, file: Path, form: ListFormat | None, *, quiet: bool
) -> JobRequest:
    """The request, with the list as its source."""
    if quiet or not console().is_terminal:
        source = await client.lists.put(file, form or format_of(file))
    else:
        source = await _with_bar(client, file, form or format_of(file))
    return msgspec.structs.replace(request, tasks=None, source=source)


async def _with_bar(client: Client, file: Path, form: ListFormat) -> ListSource:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console()) as bar:
        row = bar.add_task(f"upload {file.name}", total=None)

        def show(sent: int, total: int) -> None:
            bar.update(row, completed=sent, total=total)

        return await client.lists.put(file, form, on_sent=show)


def format_of(file: Path) -> ListFormat:
    """By its name, that of what is packed in it."""
    plain = file.with_suffix("") if file.suffix in _PACKED else file
    return _BY_NAME.get(plain.suffix, ListFormat.JSONL)
