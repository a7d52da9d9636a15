"""What a reply says, taken in piece by piece and unpacked no further than allowed.

A few kilobytes of gzip can hold gigabytes: unpacking stops at the bound, whatever is left.
"""

from __future__ import annotations

import zlib
from typing import Final, Protocol

from interlock.outbound.failures import BadReply, ReplyTooLarge

ACCEPTED: Final = "gzip, deflate"
"""For Accept-Encoding."""

_GZIP: Final = 16 + zlib.MAX_WBITS


class Body(Protocol):
    def add(self, data: bytes) -> bool:
        """False: enough was taken in."""

    def end(self) -> bytes: ...


def body_of(encoding: str, most: int, *, cut: bool) -> Body:
    """For what comes in this Content-Encoding. `cut`: what is beyond `most` bytes is left out; else it is refused."""
    name = encoding.strip().lower()
    if name in ("gzip", "x-gzip", "deflate"):
        return _Packed(name, _Bounded(most, cut=cut))
    return _Bounded(most, cut=cut)


class _Bounded:
    def __init__(self, most: int, *, cut: bool) -> None:
        self._most, self._cut = most, cut
        self._pieces: list[bytes] = []
        self.left = most

    def add(self, data: bytes) -> bool:
        if len(data) > self.left and not self._cut:
            raise ReplyTooLarge(f"The reply has more than {self._most} bytes, and no more were wanted.")
        whole = len(data) <= self.left
        self._pieces.append(data if whole else data[: self.left])
        self.left -= len(self._pieces[-1])
        return whole

    def end(self) -> bytes:
        return b"".join(self._pieces)


class _Packed:
    """gzip, also of several members; deflate, with or without the header that it should have."""

    def __init__(self, name: str, into: _Bounded) -> None:
        self._gzip, self._into = name != "deflate", into
        self._inflate: zlib._Decompress | None = None

    def add(self, data: bytes) -> bool:
        try:
            return self._unpack(data)
        except zlib.error:
            raise BadReply("The reply is not packed as it says.") from None

    def _unpack(self, data: bytes) -> bool:
        while data:
            inflate = self._next(data)
            # One byte more than there is room for tells whether there is more.
            if not self._into.add(inflate.decompress(data, self._into.left + 1)):
                self._inflate = None
                return False
            data = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
        return True

    def _next(self, data: bytes) -> zlib._Decompress:
        """What unpacks these bytes: one member of gzip may follow on another."""
        if self._inflate is None or self._inflate.eof:
            bare = data[0] & 0x0F != zlib.DEFLATED
            self._inflate = zlib.decompressobj(_GZIP if self._gzip else -zlib.MAX_WBITS if bare else zlib.MAX_WBITS)
        return self._inflate

    def end(self) -> bytes:
        if self._inflate is not None and not self._inflate.eof:
            raise BadReply("The reply ends before its end.")
        return self._into.end()
