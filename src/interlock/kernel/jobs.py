"""What every job's row says beside its name, whichever door it came in by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from interlock.errors import BadRequest
from interlock.settings import Runtime, RuntimeKind, Settings
from interlock.wire import Policy, Priority, Scaling, secret_names

_ON_CHAINS: Final = ("AddressRefused", "BadUrl", "HostNotBound")
NEVER_RETRIED: Final = {
    "block_follower": _ON_CHAINS,
    "block_ingest": _ON_CHAINS,
    "integrity_check": _ON_CHAINS,
    "http_fetch": (
        "AddressRefused",
        "BadConfig",
        "BadPayload",
        "BadUrl",
        "BodyTooLarge",
        "HostNotBound",
        "HttpRefused",
        "ReplyTooLarge",
        "TooManyRedirects",
    ),
}
"""By operator, error classes that another attempt would only repeat. They are added to those of the job's policy."""


INLINE_OPERATORS: Final = frozenset({"echo", "fail", "range_aggregator", "range_splitter"})
"""Those of a runtime inside the dispatcher. Each ends within moments: all orgs share its few places."""


def inline_problem(operator: str | None) -> str | None:
    """What is wrong with an operator for such a runtime, as a clause."""
    if operator in INLINE_OPERATORS:
        return None
    known = ", ".join(sorted(INLINE_OPERATORS))
    return f"operator {str(operator)[:60]!r} does not run inside the dispatcher, which runs only {known}"


def runtime_of(settings: Settings, name: str) -> Runtime:
    """Refuses one that nobody here could run a task in."""
    try:
        runtime = settings.runtime(name)
    except KeyError:
        known = ", ".join(settings.runtime_names)
        raise BadRequest(f"There is no runtime {name!r}; choose one of: {known}.", code="unknown_runtime") from None
    if runtime.kind is RuntimeKind.INVOKE and not settings.has_runner:
        raise BadRequest(
            f"Runtime {name!r} has no runner in this installation: set runner_url or runner_lambda.",
            code="runtime_without_runner",
        )
    return runtime


def work_columns(runtime: Runtime, *, name: str, operator: str | None, config: dict[str, Any]) -> dict[str, Any]:
    """What is done, and where. Any: columns of a row."""
    if runtime.kind is RuntimeKind.INLINE and (wrong := inline_problem(operator)):
        raise BadRequest(
            f"In runtime {name!r}, {wrong}; choose another runtime, such as 'platform'.", code="operator_not_inline"
        )
    return {
        "operator": operator,
        "runtime": name,
        "queue": runtime.queue if runtime.kind is RuntimeKind.QUEUE else None,
        "config": msgspec.json.encode(config, order="sorted").decode(),
    }


def policy_columns(
    runtime: Runtime,
    policy: Policy,
    scaling: Scaling,
    priority: Priority,
    *,
    operator: str | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """How: priority, retries, time limits and caps, which may change without changing what is made."""
    if scaling.max_concurrency_per_key is not None and scaling.key is None:
        raise BadRequest("scaling.max_concurrency_per_key needs scaling.key, a pointer into the payload.")
    timeout = policy.timeout_seconds or runtime.timeout_seconds
    final = [*NEVER_RETRIED.get(operator or "", ()), *_of_secrets(config)]
    return {
        "priority": 1 if priority is Priority.BULK else 0,
        "max_attempts": policy.max_attempts,
        "backoff_seconds": policy.backoff_seconds,
        "backoff_factor": policy.backoff_factor,
        "backoff_cap_seconds": policy.backoff_cap_seconds,
        "jitter": policy.jitter,
        "non_retryable": list(dict.fromkeys([*policy.non_retryable, *final])),
        "lease_seconds": min(policy.lease_seconds or runtime.lease_seconds, timeout),
        "timeout_seconds": timeout,
        "max_concurrency": scaling.max_concurrency,
        "concurrency_key": scaling.key,
        "max_concurrency_per_key": scaling.max_concurrency_per_key,
    }


def _of_secrets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A secret that is missing now is so for the next attempt, too."""
    return ("SecretMissing", "SecretBound") if secret_names(msgspec.json.encode(config).decode()) else ()
