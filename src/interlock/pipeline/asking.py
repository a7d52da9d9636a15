"""How operators of the platform reach other servers: with the installation's exceptions, and through its proxy."""

from __future__ import annotations

from interlock.outbound.addresses import Exceptions
from interlock.outbound.guard import Guard
from interlock.outbound.sending import KeptSender, Proxy
from interlock.workers.protocol import Outbound


def guard_of(outbound: Outbound) -> Guard:
    return Guard(Exceptions.read(outbound.allow), ports=outbound.ports)


def proxy_of(outbound: Outbound) -> Proxy | None:
    return None if outbound.proxy is None else Proxy(outbound.proxy, trusted=True)


def kept_sender(outbound: Outbound) -> KeptSender:
    return KeptSender(guard_of(outbound), proxy=proxy_of(outbound))
