"""Outbound requests of the platform's own operators, and the secrets that their configs name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from interlock.outbound.exchange import KeptSender, Proxy
from interlock.outbound.guard import Binding, Exceptions, Guard
from interlock.wire.access import TaskSecret
from interlock.workers.context import TaskContext, TaskFailed
from interlock.workers.failures import BadConfig
from interlock.workers.protocol import Outbound


def guard_of(outbound: Outbound) -> Guard:
    return Guard(Exceptions.read(outbound.allow), ports=outbound.ports)


def proxy_of(outbound: Outbound) -> Proxy | None:
    return None if outbound.proxy is None else Proxy(outbound.proxy, trusted=True)


def kept_sender(outbound: Outbound) -> KeptSender:
    return KeptSender(guard_of(outbound), proxy=proxy_of(outbound))


_PLACEHOLDER: Final = re.compile(r"\$\{(secret:)?([^}]*)\}")


class Placeholders:
    """Replaces placeholders, and records the hosts to which the inserted secrets are bound."""

    def __init__(self, secrets: Sequence[TaskSecret] = (), environment: Mapping[str, str] | None = None) -> None:
        self._secrets = {one.name: one for one in secrets}
        self._environment = environment or {}
        self._used: dict[str, list[Binding]] = {}

    @classmethod
    def of(cls, ctx: TaskContext) -> Placeholders:
        return cls(ctx.secrets, ctx.environment)

    def fill(self, text: str, field: str) -> str:
        """Replaces the placeholders. Raises BadConfig for a missing variable, TaskFailed for a missing secret."""

        def value(found: re.Match[str]) -> str:
            return self._secret(found[2], field) if found[1] else self._variable(found[2], field)

        return _PLACEHOLDER.sub(value, text)

    def bindings(self, *fields: str) -> tuple[Binding, ...]:
        """Returns the bindings of secrets inserted into these fields. `headers` includes `headers.x-key`."""
        return tuple(
            binding for used, bindings in self._used.items() if used.partition(".")[0] in fields for binding in bindings
        )

    def used_in(self, field: str) -> bool:
        """Returns True if a secret was inserted into this field, bound to hosts or not."""
        return field in self._used

    def _secret(self, name: str, field: str) -> str:
        secret = self._secrets.get(name)
        if secret is None or secret.value is None:
            raise TaskFailed(
                f"{field} refers to the secret {name!r}, which this task was not given: have an admin set it for the "
                "org.",
                "SecretMissing",
            )
        used = self._used.setdefault(field, [])
        if secret.hosts:
            used.append(Binding.read(name, secret.hosts))
        return secret.value

    def _variable(self, name: str, field: str) -> str:
        if name not in self._environment:
            raise BadConfig(
                f"{field} refers to the variable {name!r}, which this worker does not pass to this org. Have an admin "
                f"set a secret and write ${{secret:{name}}}, or start the worker with --pass-env ORG:{name}."
            )
        return self._environment[name]
