"""`interlock receipt`: check what a run left behind, without asking the platform that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from interlock.cli.connection import ask
from interlock.cli.conventions import FolderOption, command, group, usage
from interlock.cli.output import console, print_json

app = group("Receipts: proof of what became of every task of a run.")


@command(app, "keys", example="interlock receipt keys > receipt-keys.json")
def keys(folder: FolderOption = None) -> None:
    """Print the public keys that sign receipts now. Keep them: receipts outlive them."""
    print_json(ask(folder, lambda client: client.results.receipt_keys()))


@command(
    app,
    "verify",
    example="interlock receipt verify receipt.json --keys receipt-keys.json\n"
    "interlock receipt verify receipt.json --kid PkSx3… --export nightly-results",
)
def verify(
    file: Annotated[Path, typer.Argument(help="As `interlock job receipt --file` has saved it.", metavar="FILE")],
    keys_file: Annotated[
        Path | None,
        typer.Option("--keys", help="Keys that you trust, from `interlock receipt keys`.", show_default=False),
    ] = None,
    kid: Annotated[
        str | None, typer.Option(help="Thumbprint of the one key that you trust.", show_default=False)
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Folder of an export of the run, as JSON lines or Parquet: its files are checked, too.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check a receipt, offline. Exit code 1 says that it does not hold, and why."""
    from interlock.bulk.exported import tasks_of
    from interlock.bulk.verifying import verify as check

    if keys_file is None and kid is None:
        raise usage("Say whom you trust: --keys FILE with public keys, or --kid THUMBPRINT")
    verdict = check(
        _read(file),
        keys=[] if keys_file is None else _keys(keys_file),
        kid=kid,
        tasks=None if export is None else tasks_of(export),
    )
    console().print(f"The receipt is signed by key {verdict.kid}:")
    for sentence in verdict.proven:
        console().print(f"- {sentence}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise usage(f"{file} cannot be read: {error.strerror}") from None


def _keys(file: Path) -> list[dict[str, Any]]:
    import msgspec

    try:
        return msgspec.json.decode(_read(file), type=dict[str, list[dict[str, Any]]])["keys"]
    except (msgspec.MsgspecError, KeyError):
        raise usage(f"{file} is no JWK set, as `interlock receipt keys` prints it") from None
