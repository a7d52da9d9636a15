"""Metrics of the command bus. `Snavio.Cache.ACL.Usage.Stale` is `snavio_cache_acl_usage_stale_total`, and so on."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from interlock.telemetry import REGISTRY

_REFRESH: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
_LATENCY: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

COMMANDS_DELIVERED = Counter(
    "snavio_commands_delivered",
    "Commands delivered, by target and name; past 1,000 pairs of them as `other`.",
    ["target", "name", "path"],
    registry=REGISTRY,
)
COMMANDS_FAILED = Counter("snavio_commands_failed", "Commands not dispatched.", ["reason"], registry=REGISTRY)
COMMANDS_INVALID = Counter(
    "snavio_commands_invalid", "Commands that break the protocol.", ["reason"], registry=REGISTRY
)
COMMANDS_ESCALATED = Counter(
    "snavio_commands_escalated", "Commands handed from the fast stage to the slow one.", ["reason"], registry=REGISTRY
)
HMAC_FAILURES = Counter("snavio_hmac_failures", "Commands whose signature does not verify.", registry=REGISTRY)
MISROUTES = Counter("snavio_misroutes", "Commands for which no route is registered.", registry=REGISTRY)

CACHE_FRESH = Counter("snavio_cache_usage_fresh", "Look-ups answered by fresh data.", registry=REGISTRY)
CACHE_STALE = Counter("snavio_cache_usage_stale", "Look-ups answered by stale data.", registry=REGISTRY)
CACHE_EXPIRED = Counter("snavio_cache_usage_expired", "Look-ups that had to wait for a refresh.", registry=REGISTRY)
CACHE_USAGE_STALE: Final = {
    kind: Counter(f"snavio_cache_{kind}_usage_stale", f"Of those, of {what}.", registry=REGISTRY)
    for kind, what in (("acl", "ACLs"), ("routing", "routes"), ("hmac", "keys"))
}
CACHE_REFRESH_DURATION: Final = {
    kind: Histogram(
        f"snavio_cache_{kind}_refresh_duration_seconds", f"Time to refresh {what}.", buckets=_REFRESH, registry=REGISTRY
    )
    for kind, what in (("acl", "ACLs"), ("routing", "routes"), ("hmac", "keys"))
}
CACHE_STALE_WINDOW: Final = {
    kind: Gauge(
        f"snavio_cache_{kind}_stale_window_seconds",
        f"How long {what} had been stale at their last use as such.",
        registry=REGISTRY,
    )
    for kind, what in (("acl", "ACLs"), ("routing", "routes"), ("hmac", "keys"))
}
SNAPSHOT_LOAD_FAILURES = Counter(
    "snavio_cache_snapshot_load_failure", "Snapshots that were not used, and why.", ["reason"], registry=REGISTRY
)
SNAPSHOTS_GENERATED = Counter("snavio_snapshot_generated", "Snapshots published.", registry=REGISTRY)
SNAPSHOT_SIZE = Gauge("snavio_snapshot_size_bytes", "Size of the last snapshot.", registry=REGISTRY)
SNAPSHOT_WRITE_DURATION = Histogram(
    "snavio_snapshot_write_duration_seconds", "Time to publish a snapshot.", buckets=_REFRESH, registry=REGISTRY
)
SNAPSHOTS_TOO_LARGE = Counter(
    "snavio_snapshot_too_large", "Snapshots not published, since they are past the limit.", registry=REGISTRY
)

DEDUP_STRICT_MODE_USAGE = Counter(
    "snavio_dedup_strict_mode_usage", "Commands for routes with strict deduplication.", registry=REGISTRY
)
DEDUP_DUPLICATES_PREVENTED = Counter(
    "snavio_dedup_duplicates_prevented", "Duplicates found, by stage.", ["path"], registry=REGISTRY
)
DEDUP_ESCALATIONS = Counter(
    "snavio_dedup_escalations", "Commands handed to the slow stage to be deduplicated.", registry=REGISTRY
)
DEDUP_SLOW_PATH_LATENCY = Histogram(
    "snavio_dedup_slow_path_latency_seconds",
    "From acceptance to the end of the slow stage, of commands with strict deduplication.",
    buckets=_LATENCY,
    registry=REGISTRY,
)

LIMITS_EXCEEDED = Counter(
    "snavio_limits_exceeded",
    "Looks at a limit that is counted after dispatch, relaxed or shadow, that found it passed.",
    ["enforcement"],
    registry=REGISTRY,
)
WARM_PATH_BANS = Counter("snavio_warm_path_bans", "Sources that lost the fast stage for a while.", registry=REGISTRY)
GLOBAL_BANS = Counter("snavio_global_bans", "Sources that lost it everywhere.", registry=REGISTRY)

TELEMETRY_EVENTS = Counter(
    "snavio_telemetry_events", "Events handed to telemetry queues.", ["event"], registry=REGISTRY
)
TELEMETRY_OLDEST = Gauge(
    "snavio_telemetry_oldest_seconds",
    "How long the oldest telemetry waits for its tenant, of the tenants last looked at.",
    registry=REGISTRY,
)
TELEMETRY_DROPPED = Counter(
    "snavio_telemetry_dropped", "Events that aged out of a telemetry queue that nobody consumes.", registry=REGISTRY
)

ALERTS = Counter("snavio_alerts", "Alerts opened.", ["event"], registry=REGISTRY)
ALERTS_UNROUTED = Counter(
    "snavio_alerts_unrouted",
    "Critical alerts for which no address and no webhook is set.",
    ["event"],
    registry=REGISTRY,
)

ROUTES = Gauge("snavio_routes", "Routes with a queue, by health.", ["status"], registry=REGISTRY)

_MOST_ROUTES: Final = 1_000
_routes: set[tuple[str, str]] = set()


def delivered(target: str, name: str, path: str, count: int = 1) -> None:
    """Each pair is a time series of whoever scrapes this: tenants may have any number of routes, and get so many."""
    if (target, name) not in _routes:
        if len(_routes) >= _MOST_ROUTES:
            target = name = "other"
        else:
            _routes.add((target, name))
    COMMANDS_DELIVERED.labels(target, name, path).inc(count)
