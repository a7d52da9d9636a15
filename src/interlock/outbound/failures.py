"""How an exchange with somebody else's server fails.

OutboundFailed
├── BadUrl             what is to be asked is no URL of http or https
├── AddressRefused     the address, or the port, is none that may be reached from here
├── HostNotBound       a secret of the request is bound to other hosts
├── NameUnknown        the name has no address, or none for now
├── Unreachable        no connection, or one that broke before a reply came
│   ├── TlsFailed      the server is not the one it should be, or speaks no TLS
│   └── ProxyFailed    the forward proxy does not let the request through
├── TooSlow            no whole reply in time
├── BadReply           what came is no HTTP, or ends before its end
├── ReplyTooLarge      more bytes than were wanted, as sent or unpacked
└── TooManyRedirects   one redirect after the other

What they say names the host at most: paths and queries of URLs often hold a key.
"""

from __future__ import annotations

from typing import ClassVar


class OutboundFailed(Exception):
    retryable: ClassVar[bool] = True
    """Whether the same request may go well later."""


class BadUrl(OutboundFailed):
    retryable = False


class AddressRefused(OutboundFailed):
    retryable = False


class HostNotBound(OutboundFailed):
    retryable = False


class NameUnknown(OutboundFailed):
    pass


class Unreachable(OutboundFailed):
    def __init__(self, message: str, *, broke_off: bool = False) -> None:
        super().__init__(message)
        self.broke_off = broke_off
        """There was a connection, and it ended before the reply."""


class TlsFailed(Unreachable):
    def __init__(self, message: str, *, untrusted: bool = False) -> None:
        super().__init__(message)
        self.untrusted = untrusted
        """The certificate was refused: another try gets the same one."""


class ProxyFailed(Unreachable):
    pass


class TooSlow(OutboundFailed):
    pass


class BadReply(OutboundFailed):
    pass


class ReplyTooLarge(OutboundFailed):
    retryable = False


class TooManyRedirects(OutboundFailed):
    retryable = False
