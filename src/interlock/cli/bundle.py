"""`interlock bundle`: packs, uploads and manages zips of user code."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from interlock.cli.conventions import (
    CursorOption,
    FolderOption,
    LimitOption,
    Output,
    OutputOption,
    YesOption,
    ask,
    collect,
    command,
    group,
)
from interlock.cli.output import confirm, present, sheet, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from interlock.client import Client
    from interlock.wire.bundles import BundlePage, BundleView

app = group("Bundles: zips of your own code, which run in a sandbox.")

_HASH: Final = 12
_MODULES_SHOWN: Final = 20

BundleArgument = Annotated[
    str, typer.Argument(metavar="BUNDLE", help="Name of the bundle, or a prefix of its sha256.", show_default=False)
]


@command(app, "pack", example="interlock bundle pack examples/bundles/alerts --out alerts.zip")
def pack(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the code.", file_okay=False, exists=True)],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. Default: the folder's name with .zip", show_default=False),
    ] = None,
) -> None:
    """Pack a folder into a zip. The same files produce the same bytes on every machine.

    __pycache__, .pyc files, .git and .venv are excluded. Symbolic links are refused.
    """
    from interlock.archives import digest_of
    from interlock.archives import pack as write

    target = out or Path(f"{source.resolve().name}.zip")
    files = write(source, target)
    print(f"{target}: {files} file{'s' * (files != 1)}, sha256 {digest_of(target)}")


@command(
    app,
    "upload",
    example="interlock bundle upload examples/bundles/alerts --name alerts\ninterlock bundle upload alerts.zip",
)
def upload(
    source: Annotated[Path, typer.Argument(metavar="PATH", help="A zip file, or a folder to pack.", exists=True)],
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name for use in jobs. If an older bundle has it, it moves to this one.", show_default=False
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Upload user code. Uploading the same content again returns the same bundle.

    Deployed jobs keep the bundle that the name referred to at that time. Deploy them again to use the new one.
    """
    content = _content(source)
    present(ask(folder, lambda client: client.bundles.upload(content, name=name)), output, _sheet)


@command(app, "list", example="interlock bundle list")
def list_bundles(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    output: OutputOption = Output.TABLE,
    folder: FolderOption = None,
) -> None:
    """Show all bundles."""
    from interlock.wire.bundles import BundlePage

    async def read(client: Client) -> BundlePage:
        found, following = await collect(client.bundles.page, lambda page: page.bundles, cursor, limit)
        return BundlePage(bundles=found, next_cursor=following)

    present(ask(folder, read), output, _table)


@command(app, "show", example="interlock bundle show alerts")
def show(bundle: BundleArgument, output: OutputOption = Output.TABLE, folder: FolderOption = None) -> None:
    """Show a bundle and the modules that an entrypoint can name."""
    present(ask(folder, lambda client: client.bundles.bundle(bundle)), output, _sheet)


@command(app, "delete", example="interlock bundle delete alerts --yes")
def delete(
    bundle: BundleArgument, yes: YesOption = False, output: OutputOption = Output.TABLE, folder: FolderOption = None
) -> None:
    """Delete a bundle that no job uses."""
    confirm(f"Delete the bundle {bundle} and all its names?", yes=yes)
    present(ask(folder, lambda client: client.bundles.delete(bundle)), output, _sheet)


@command(app, "runner", example="interlock bundle runner --out runner.zip")
def write_runner(
    out: Annotated[Path, typer.Option("--out", help="File to write.")] = Path("interlock-runner.zip"),
) -> None:
    """Write the code of the AWS Lambda function that runs bundles, for the setting runner_lambda."""
    from interlock.archives import digest_of
    from interlock.untrusted.runner.confinement import HANDLER, write

    files = write(out)
    print(f"{out}: {files} files, sha256 {digest_of(out)}, handler {HANDLER}")


def _content(source: Path) -> bytes:
    if source.is_file():
        return source.read_bytes()
    from interlock.archives import pack as write

    with tempfile.TemporaryDirectory(prefix="interlock-bundle-") as folder:
        target = Path(folder) / "bundle.zip"
        write(source, target)
        return target.read_bytes()


def _table(page: BundlePage) -> RenderableType:
    rows = [
        (each.sha256[:_HASH], each.names, f"{each.size_bytes:,}", each.files, each.uploaded_by, each.uploaded_at)
        for each in page.bundles
    ]
    columns = ("sha256", "names", "bytes", "files", "by", "uploaded")
    return table(columns, rows, empty="There are no bundles; upload one: interlock bundle upload DIR --name NAME")


def _sheet(bundle: BundleView) -> RenderableType:
    named = [f"{name} ({language})" for name, language in sorted(bundle.modules.items())]
    more = [f"and {len(named) - _MODULES_SHOWN} more"] if len(named) > _MODULES_SHOWN else []
    return sheet(
        [
            ("sha256", bundle.sha256),
            ("names", bundle.names or None),
            ("bytes", f"{bundle.size_bytes:,}"),
            ("unpacked", f"{bundle.unpacked_bytes:,}"),
            ("files", bundle.files),
            ("modules", [*named[:_MODULES_SHOWN], *more]),
            ("by", bundle.uploaded_by),
            ("uploaded", bundle.uploaded_at),
        ]
    )
