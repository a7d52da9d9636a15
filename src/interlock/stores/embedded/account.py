"""The operating system user of the servers, and its access to folders.

PostgreSQL refuses to run as root. If we are root, both servers run as the system user `pgserver`, which the package of
the PostgreSQL binaries would also create; otherwise they run as our user. On a machine without useradd they run as
`nobody`. Other services may also run as `nobody` and could then read the files of the servers, so a warning is logged.

POSIX access control lists let that user traverse a folder without opening it to all others. They are written in the
format of the kernel (`linux/posix_acl_xattr.h`), because the standard library has no API and `setfacl` is not
installed everywhere: a version, then entries of tag, rights and id, sorted by tag.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import structlog

_NAME: Final = "system.posix_acl_access"
_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _NAMED_GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NOBODY: Final = 0xFFFF_FFFF
_EXECUTE: Final = 0o1

_Entries = dict[tuple[int, int], int]
"""Rights by tag and id."""


def let_pass(folder: Path, uid: int) -> bool:
    """Lets `uid` traverse the folder. Returns False if the file system does not support access control lists."""
    if sys.platform != "linux":
        return False
    entries = _read(folder)
    if entries is None:
        return False
    entries[_USER, uid] = entries.get((_USER, uid), 0) | _EXECUTE
    # The mask limits the group and all named entries: they keep their effective rights and get no others.
    before = entries.get((_MASK, _NOBODY), entries[_GROUP, _NOBODY])
    entries[_MASK, _NOBODY] = before | _EXECUTE
    for key in entries:
        if key != (_USER, uid) and key[0] in (_USER, _GROUP, _NAMED_GROUP):
            entries[key] &= before
    packed = b"".join(_ENTRY.pack(tag, rights, who) for (tag, who), rights in sorted(entries.items()))
    try:
        os.setxattr(folder, _NAME, _VERSION + packed)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return False
    return True


def passes(folder: Path, uid: int) -> bool:
    """Returns True if an ACL entry lets `uid` traverse the folder."""
    entries = (_read(folder) or {}) if sys.platform == "linux" else {}
    rights = entries.get((_USER, uid), 0) & entries.get((_MASK, _NOBODY), 0)
    return bool(rights & _EXECUTE)


def _read(folder: Path) -> _Entries | None:
    """Returns the list of a folder, or the equivalent of its mode; None without support for lists."""
    try:
        data = os.getxattr(folder, _NAME)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return None
        if error.errno != errno.ENODATA:
            raise
        mode = stat.S_IMODE(folder.stat().st_mode)
        return {(_OWNER, _NOBODY): mode >> 6 & 7, (_GROUP, _NOBODY): mode >> 3 & 7, (_OTHERS, _NOBODY): mode & 7}
    return {(tag, who): rights for tag, rights, who in _ENTRY.iter_unpack(data[len(_VERSION) :])}


SYSTEM_USER: Final = "pgserver"
_SHARED_USER: Final = "nobody"
_USUAL_PLACES: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Folders of system programs, which are missing in the PATH of ordinary shells and of many containers."""

_log = structlog.get_logger("interlock.embedded")
_making_user = threading.Lock()


class Identity(TypedDict):
    """Arguments of `subprocess` to run a child as another user; all None to keep our user."""

    user: int | None
    group: int | None
    extra_groups: Sequence[int] | None


class AccountError(OSError):
    """Raised when the user of the servers is missing or cannot access a folder. The message says what to do."""


@dataclass(frozen=True)
class Account:
    uid: int
    gid: int
    name: str
    switched: bool
    """True if the servers run as another user than this process."""

    @property
    def identity(self) -> Identity:
        if not self.switched:
            return Identity(user=None, group=None, extra_groups=None)
        return Identity(user=self.uid, group=self.gid, extra_groups=[])

    def own(self, path: Path) -> None:
        if self.switched:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def make_home(self, folder: Path) -> None:
        """Creates a folder of ours that the servers can traverse and nobody else can enter.

        We keep its ownership even if the servers run as another user: a compromised server must not be able to plant a
        link
        in place of a file that root is about to write.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise AccountError(f"{folder} belongs to another user; start as that user, or choose another folder")
        if self.switched:
            os.chown(folder, -1, self.gid)
        folder.chmod(0o710 if self.switched else 0o700)

    def let_through(self, path: Path) -> None:
        """Lets the user of the servers, and nobody else, traverse the folders above `path`."""
        if not self.switched:
            return
        for folder in reversed(path.resolve().parents):
            if not self._passes(folder):
                self._add_passage(folder, path)

    def check_may_run(self, binary: Path) -> None:
        if self.switched and self._rights(binary) & 0o5 != 0o5:
            raise AccountError(
                f"user {self.name} cannot read and execute {binary}; run `chmod -R o+rX` on the folder with the "
                "Python packages, or do not start as root"
            )

    def _passes(self, folder: Path) -> bool:
        return bool(self._rights(folder) & 0o1) or passes(folder, self.uid)

    def _rights(self, path: Path) -> int:
        """Returns the read, write and execute bits that apply to the user of the servers."""
        found = path.stat()
        if found.st_uid == self.uid:
            return found.st_mode >> 6 & 0o7
        if found.st_gid == self.gid:
            return found.st_mode >> 3 & 0o7
        return found.st_mode & 0o7

    def _add_passage(self, folder: Path, path: Path) -> None:
        try:
            if not let_pass(folder, self.uid):
                self._pass_by_group(folder)
        except OSError as error:
            raise self._no_passage(folder, path) from error
        if not self._passes(folder):
            raise self._no_passage(folder, path)
        _log.warning("folder_opened_for_passage", folder=str(folder), user=self.name)

    def _pass_by_group(self, folder: Path) -> None:
        """Grants access by group, for file systems without access control lists, if the group has no rights to lose."""
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & stat.S_IRWXG == 0:
            os.chown(folder, -1, self.gid)
            folder.chmod(mode | stat.S_IXGRP)

    def _no_passage(self, folder: Path, path: Path) -> AccountError:
        return AccountError(
            f"user {self.name} cannot traverse {folder} on the way to {path}; run `chmod o+x {folder}`, choose "
            "another folder, or do not start as root"
        )


def server_account() -> Account:
    if os.geteuid() != 0:
        return Account(os.geteuid(), os.getegid(), _own_name(), switched=False)
    entry = _system_user()
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name, switched=True)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # containers run with user ids that have no name
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
    output = _useradd()
    # Look it up instead of checking the exit code: another process may have created the user concurrently.
    entry = _look_up(SYSTEM_USER)
    if entry is not None:
        return entry
    shared = _look_up(_SHARED_USER)
    if shared is None or shared.pw_uid == 0:
        raise AccountError(
            f"PostgreSQL does not run as root, and the system user {SYSTEM_USER} could not be created ({output}); "
            "create it, start as an ordinary user, or set the URLs of your own servers"
        )
    _log.warning(
        "servers_share_a_user",
        user=_SHARED_USER,
        meaning=f"other services that run as {_SHARED_USER} can read the files of the embedded servers; create the "
        f"user {SYSTEM_USER} before the first start",
        reason=output,
    )
    return shared


def _useradd() -> str:
    """Creates the system user. Returns the output of the program, or why it could not run."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), *_USUAL_PLACES])
    program = shutil.which("useradd", path=places)
    if program is None:
        return f"useradd is not on PATH or in {', '.join(_USUAL_PLACES)}"
    command = [program, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", SYSTEM_USER]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
