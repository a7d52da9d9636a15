"""Keys in a config: `${secret:NAME}` is a secret of the org, `${NAME}` a variable that the worker passes on to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from interlock.outbound.bindings import Binding
from interlock.pipeline.failures import BadConfig
from interlock.wire import TaskSecret
from interlock.workers.context import TaskContext, TaskFailed

_PLACEHOLDER: Final = re.compile(r"\$\{(secret:)?([^}]*)\}")


class Placeholders:
    """Fills texts in, and remembers which hosts the secrets in them are bound to."""

    def __init__(self, secrets: Sequence[TaskSecret] = (), environment: Mapping[str, str] | None = None) -> None:
        self._secrets = {one.name: one for one in secrets}
        self._environment = environment or {}
        self._used: dict[str, list[Binding]] = {}

    @classmethod
    def of(cls, ctx: TaskContext) -> Placeholders:
        return cls(ctx.secrets, ctx.environment)

    def fill(self, text: str, field: str) -> str:
        """Raises BadConfig for a variable, and TaskFailed for a secret, that the task does not have."""

        def value(found: re.Match[str]) -> str:
            return self._secret(found[2], field) if found[1] else self._variable(found[2], field)

        return _PLACEHOLDER.sub(value, text)

    def bindings(self, *fields: str) -> tuple[Binding, ...]:
        """Of the secrets that were filled into these fields; `headers` has `headers.x-key`."""
        return tuple(
            binding for used, bindings in self._used.items() if used.partition(".")[0] in fields for binding in bindings
        )

    def _secret(self, name: str, field: str) -> str:
        secret = self._secrets.get(name)
        if secret is None or secret.value is None:
            raise TaskFailed(f"{field} names the secret {name!r}, which this task was not given.", "SecretMissing")
        if secret.hosts:
            self._used.setdefault(field, []).append(Binding.read(name, secret.hosts))
        return secret.value

    def _variable(self, name: str, field: str) -> str:
        if name not in self._environment:
            raise BadConfig(
                f"{field} names the variable {name!r}, which no worker passes on to this org. Have an admin set a "
                f"secret and write ${{secret:{name}}}; or start the worker with --pass-env ORG:{name}."
            )
        return self._environment[name]
