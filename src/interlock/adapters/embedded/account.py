"""The operating-system user the servers run as, and what that user must be able to reach.

PostgreSQL refuses to run as root. When we are root, both servers run as the system user `pgserver`, the same
one that the package of the PostgreSQL binaries would make; otherwise they run as whoever we are. A machine without a
program that makes users has them run as `nobody`, which other services may be, too: those can then read the servers'
files, and the start says so.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import structlog

from interlock.adapters.embedded import acl

SYSTEM_USER: Final = "pgserver"
_SHARED_USER: Final = "nobody"
_USUAL_PLACES: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Of system programs: PATH of an ordinary shell, and of many containers, lacks them."""

_log = structlog.get_logger("interlock.embedded")
_making_user = threading.Lock()


class Identity(TypedDict):
    """What `subprocess` needs to run a child as somebody else; all None for a child that stays as we are."""

    user: int | None
    group: int | None
    extra_groups: Sequence[int] | None


class AccountError(OSError):
    """The servers' user is missing or cannot reach a folder; the message says what to do."""


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    name: str
    switched: bool
    """True when the servers run as another user than we do."""

    @property
    def identity(self) -> Identity:
        if not self.switched:
            return Identity(user=None, group=None, extra_groups=None)
        return Identity(user=self.uid, group=self.gid, extra_groups=[])

    def own(self, path: Path) -> None:
        if self.switched:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def make_home(self, folder: Path) -> None:
        """A folder of ours that the servers may pass through and nobody else may enter.

        It stays ours when the servers run as another user: a server that was broken into cannot then plant a
        link under the name of a file that root is about to write.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise AccountError(f"{folder} belongs to another user: start as that one, or choose another folder")
        if self.switched:
            os.chown(folder, -1, self.gid)
        folder.chmod(0o710 if self.switched else 0o700)

    def let_through(self, path: Path) -> None:
        """Lets the servers' user pass the folders above `path`, and nobody else: no folder is opened to all users."""
        if not self.switched:
            return
        for folder in reversed(path.resolve().parents):
            if not self._passes(folder):
                self._add_passage(folder, path)

    def check_may_run(self, binary: Path) -> None:
        if self.switched and self._rights(binary) & 0o5 != 0o5:
            raise AccountError(
                f"user {self.name} may not read and run {binary}: run `chmod -R o+rX` on the folder that "
                "Python's packages are in, or do not start as root"
            )

    def _passes(self, folder: Path) -> bool:
        return bool(self._rights(folder) & 0o1) or acl.passes(folder, self.uid)

    def _rights(self, path: Path) -> int:
        """The read, write and execute bits that count for the servers' user."""
        found = path.stat()
        if found.st_uid == self.uid:
            return found.st_mode >> 6 & 0o7
        if found.st_gid == self.gid:
            return found.st_mode >> 3 & 0o7
        return found.st_mode & 0o7

    def _add_passage(self, folder: Path, path: Path) -> None:
        try:
            if not acl.let_pass(folder, self.uid):
                self._pass_by_group(folder)
        except OSError as error:
            raise self._no_passage(folder, path) from error
        if not self._passes(folder):
            raise self._no_passage(folder, path)
        _log.warning("folder_opened_for_passage", folder=str(folder), user=self.name)

    def _pass_by_group(self, folder: Path) -> None:
        """For file systems without access control lists. Only where the group has no rights that it would lose."""
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & stat.S_IRWXG == 0:
            os.chown(folder, -1, self.gid)
            folder.chmod(mode | stat.S_IXGRP)

    def _no_passage(self, folder: Path, path: Path) -> AccountError:
        return AccountError(
            f"user {self.name} cannot pass {folder} on the way to {path}: run `chmod o+x {folder}`, choose a "
            "folder elsewhere, or do not start as root"
        )


def server_account() -> Account:
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), _own_name(), switched=False)
    entry = _system_user()
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name, switched=True)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # containers run under numbers that have no name
        return str(os.geteuid())


def _system_user() -> pwd.struct_passwd:
    with _making_user:
        entry = _look_up(SYSTEM_USER)
        return entry or _make_system_user()


def _look_up(name: str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _make_system_user() -> pwd.struct_passwd:
    said = _useradd()
    # Looked up again rather than trusting the exit code: another process may have made the user meanwhile.
    entry = _look_up(SYSTEM_USER)
    if entry is not None:
        return entry
    shared = _look_up(_SHARED_USER)
    if shared is None or shared.pw_uid == 0:
        raise AccountError(
            f"PostgreSQL does not run as root, and the system user {SYSTEM_USER} could not be made ({said}): "
            "create it, start as an ordinary user, or give the URLs of servers of your own"
        )
    _log.warning(
        "servers_share_a_user",
        user=_SHARED_USER,
        meaning=f"other services that run as {_SHARED_USER} can read the embedded servers' files: create the user "
        f"{SYSTEM_USER} before the first start",
        reason=said,
    )
    return shared


def _useradd() -> str:
    """Makes the system user. Returns what the program said, or why there is none."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), *_USUAL_PLACES])
    program = shutil.which("useradd", path=places)
    if program is None:
        return f"there is no useradd on PATH, nor in {', '.join(_USUAL_PLACES)}"
    command = [program, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", SYSTEM_USER]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
