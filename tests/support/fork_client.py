"""Client of the fork server: processes of Interlock that need no imports."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

SERVER = Path(__file__).with_name("fork_server.py")


@dataclass
class Forked:
    """A forked process with the interface of an asyncio process."""

    pid: int
    returncode: int | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """One server for all tests of a run, since they share an event loop. It ends with this process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._starts: asyncio.Queue[Forked] = asyncio.Queue()
        self._running: dict[int, Forked] = {}
        self._one_by_one = asyncio.Lock()
        asyncio.get_running_loop().add_reader(channel, self._listen)

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(SERVER), str(theirs.fileno())),
                env=dict(environment),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(ours)

    async def fork(self, arguments: Sequence[str], output: BinaryIO, handover: socket.socket) -> Forked:
        async with self._one_by_one:
            socket.send_fds(self._channel, [json.dumps(arguments).encode()], [output.fileno(), handover.fileno()])
            return await self._starts.get()

    def _listen(self) -> None:
        packet = self._channel.recv(4096)
        if not packet:
            asyncio.get_running_loop().remove_reader(self._channel)
            raise RuntimeError("the fork server has exited: see its stderr")
        pid, *code = json.loads(packet)
        if code:
            self._running.pop(pid).end(code[0])
        else:
            started = self._running[pid] = Forked(pid)
            self._starts.put_nowait(started)


_servers: dict[int, ForkServer] = {}


async def fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Returns the fork server of this process and starts it if needed."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = await ForkServer.start(environment)
    return _servers[os.getpid()]
