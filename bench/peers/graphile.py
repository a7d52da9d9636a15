"""graphile-worker, as its documentation recommends for performance: a local queue, and completions in batches.

`graphile_worker.mjs` runs it on Node. npm installs it into the virtual environment when it is first measured: exactly
this version, without install scripts, and only if npm verified the archive against the hash below.
The version is the newest that does not require Node 22.18; its successor was no faster here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from bench.peers.process import Peer, PeerFailed

VERSION = "0.17.3"
_INTEGRITY = "sha512-5vX/nDit7vXDw6JauGE7CpE4uYWu8XLTDkcL3msqwVRwrtxBqawL1C55INfXGtoyV1DIkWvvPdeKtXuLRGYyLg=="
_DRIVER_VERSION = "8.23.1"
_INSTALL_SECONDS = 120


async def peer() -> Peer:
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        raise PeerFailed("Node.js with npm is not on PATH.")
    return Peer(
        name=f"graphile-worker {VERSION}",
        command=[node, str(Path(__file__).with_name("graphile_worker.mjs"))],
        directory=await _installed(npm),
        workers=1,
        # It deletes completed jobs.
        idle="select not exists (select 1 from graphile_worker._private_jobs)",
    )


async def _installed(npm: str) -> Path:
    in_environment = sys.prefix != sys.base_prefix
    home = Path(sys.prefix) if in_environment else Path(tempfile.mkdtemp(prefix="interlock-bench-"))
    folder = home / "peers" / f"graphile-worker-{VERSION}"
    if _integrity(folder) != _INTEGRITY:
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {"graphile-worker": VERSION, "pg": _DRIVER_VERSION}
        (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}))
        await _install(npm, folder)
    if _integrity(folder) != _INTEGRITY:
        raise PeerFailed(f"npm installed a graphile-worker {VERSION} with a different hash than expected.")
    return folder


def _integrity(folder: Path) -> str | None:
    """Returns the hash against which npm verified the archive."""
    with contextlib.suppress(FileNotFoundError, KeyError):
        record = json.loads((folder / "node_modules" / ".package-lock.json").read_text())
        return str(record["packages"]["node_modules/graphile-worker"]["integrity"])
    return None


async def _install(npm: str, folder: Path) -> None:
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    process = await asyncio.create_subprocess_exec(
        npm, "install", *options, cwd=folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), _INSTALL_SECONDS)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise PeerFailed(f"npm could not install it within {_INSTALL_SECONDS} s.") from error
    if process.returncode:
        reason = (errors.decode(errors="replace").strip().splitlines() or ["no reason given"])[0]
        raise PeerFailed(f"npm could not install it: {reason}")
