"""`interlock receipt`: verifies a run's receipt without contacting the platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from interlock.cli.conventions import FolderOption, ask, command, group, usage
from interlock.cli.output import console, print_json

app = group("Receipts: signed proof of the outcome of every task of a run.")


@command(app, "keys", example="interlock receipt keys > receipt-keys.json")
def keys(folder: FolderOption = None) -> None:
    """Print the public keys that currently sign receipts. Store them: receipts remain valid after key rotation."""
    print_json(ask(folder, lambda client: client.results.receipt_keys()))


@command(
    app,
    "verify",
    example="interlock receipt verify receipt.json --keys receipt-keys.json\n"
    "interlock receipt verify receipt.json --kid PkSx3… --export nightly-results",
)
def verify(
    file: Annotated[Path, typer.Argument(help="Receipt saved by `interlock job receipt --file`.", metavar="FILE")],
    keys_file: Annotated[
        Path | None,
        typer.Option("--keys", help="Trusted keys, from `interlock receipt keys`.", show_default=False),
    ] = None,
    kid: Annotated[str | None, typer.Option(help="Thumbprint of the only trusted key.", show_default=False)] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Folder with an export of the run, as JSON lines or Parquet, to verify as well.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Verify a receipt offline. Exit code 1 if it is not valid, with the reason."""
    from interlock.jobs.receipt_verification import tasks_of
    from interlock.jobs.receipt_verification import verify as check

    if keys_file is None and kid is None:
        raise usage("Give the keys that you trust: --keys FILE with public keys, or --kid THUMBPRINT")
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
        raise usage(f"{file} is not a JWK set as printed by `interlock receipt keys`") from None
