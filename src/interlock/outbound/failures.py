"""Errors of requests to external servers.

OutboundFailed
├── BadUrl             the URL is not a valid http or https URL
├── AddressRefused     the address or the port must not be reached from here
├── HostNotBound       a secret in the request is bound to other hosts
├── NameUnknown        the name cannot be resolved, at least for now
├── Unreachable        the connection failed, or broke before a response arrived
│   ├── TlsFailed      the certificate is not trusted, or TLS failed
│   └── ProxyFailed    the forward proxy rejected the request
├── TooSlow            the response was not complete before the timeout
├── BadReply           the response is not valid HTTP, or is truncated
├── ReplyTooLarge      the response exceeds the size limit, compressed or decompressed
└── TooManyRedirects   the limit on redirects is exceeded

Messages contain at most the host, because paths and queries of URLs often contain a key.
"""

from __future__ import annotations

from typing import ClassVar


class OutboundFailed(Exception):
    retryable: ClassVar[bool] = True
    """True if the same request may succeed later."""


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
        """True if the connection was established and then closed before the response."""


class TlsFailed(Unreachable):
    def __init__(self, message: str, *, untrusted: bool = False) -> None:
        super().__init__(message)
        self.untrusted = untrusted
        """True if the certificate was rejected; a retry gets the same certificate."""


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
