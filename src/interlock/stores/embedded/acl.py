"""POSIX access control lists: let one more user traverse a folder, without opening it to all others.

Uses the format of the kernel (`linux/posix_acl_xattr.h`), because the standard library has no API and `setfacl` is not
installed everywhere: a version, then entries of tag, rights and id, sorted by tag.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
from pathlib import Path
from typing import Final

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
