"""Host bindings of secrets: a request that contains the secret may only go to these hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from interlock.outbound.addresses import host_and_port, is_name, literal, plain_name
from interlock.outbound.failures import HostNotBound


@dataclass(frozen=True)
class Binding:
    """Exact hosts without wildcards, each on one port or on all ports (None)."""

    secret: str
    """Name of the secret, for error messages."""
    hosts: frozenset[tuple[str, int | None]]

    @classmethod
    def read(cls, secret: str, entries: Iterable[str]) -> Binding:
        """Parses the entries. Raises ValueError with the expected format."""
        return cls(secret, frozenset(map(_host, entries)))

    def check(self, host: str, port: int) -> None:
        """Raises HostNotBound. The message does not repeat the URL, which may contain the secret."""
        plain = _plain(host)
        if (plain, None) not in self.hosts and (plain, port) not in self.hosts:
            raise HostNotBound(
                f"The secret {self.secret!r} is not bound to {host}:{port}, so the request was not sent. To allow "
                "this host, "
                "set the secret again and add the host with --host."
            )


def plain_hosts(entries: Iterable[str]) -> list[str]:
    """Returns the entries as they are stored and displayed: in lower case, without a final dot. Raises ValueError."""
    return list(dict.fromkeys(_shown(*_host(entry)) for entry in entries))


def _host(entry: str) -> tuple[str, int | None]:
    host, port = host_and_port(entry)
    plain = _plain(host)
    if literal(plain) is None and not is_name(plain):
        raise ValueError(
            f"{entry!r} is not a host: write a name such as rpc.example.com, or an address, without scheme and path; a "
            "port may follow, as in rpc.example.com:8545 or [2001:db8::1]:8545. Write international names in "
            "punycode (xn--...)"
        )
    return plain, port


def _plain(host: str) -> str:
    """Returns one canonical spelling per host; IPv6 addresses have many."""
    address = literal(host)
    return plain_name(host) if address is None else str(address)


def _shown(host: str, port: int | None) -> str:
    if port is None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
