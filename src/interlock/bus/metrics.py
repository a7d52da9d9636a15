"""Metrics of the command bus. `Snavio.Cache.ACL.Usage.Stale` is exported as `snavio_cache_acl_usage_stale_total`."""

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
    "snavio_commands_escalated",
    "Commands escalated from the fast stage to the slow stage.",
    ["reason"],
    registry=REGISTRY,
)
HMAC_FAILURES = Counter("snavio_hmac_failures", "Commands whose signature does not verify.", registry=REGISTRY)
MISROUTES = Counter("snavio_misroutes", "Commands for which no route is registered.", registry=REGISTRY)

CACHE_FRESH = Counter("snavio_cache_usage_fresh", "Cache look-ups answered by fresh entries.", registry=REGISTRY)
CACHE_STALE = Counter("snavio_cache_usage_stale", "Cache look-ups answered by stale entries.", registry=REGISTRY)
CACHE_EXPIRED = Counter("snavio_cache_usage_expired", "Cache look-ups that found an expired entry.", registry=REGISTRY)
CACHE_USAGE_STALE: Final = {
    kind: Counter(f"snavio_cache_{kind}_usage_stale", f"Look-ups answered by stale {what}.", registry=REGISTRY)
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
        f"Seconds that {what} had been stale at their last stale use.",
        registry=REGISTRY,
    )
    for kind, what in (("acl", "ACLs"), ("routing", "routes"), ("hmac", "keys"))
}
SNAPSHOT_LOAD_FAILURES = Counter(
    "snavio_cache_snapshot_load_failure", "Snapshots that were not used, by reason.", ["reason"], registry=REGISTRY
)
SNAPSHOTS_GENERATED = Counter("snavio_snapshot_generated", "Snapshots published.", registry=REGISTRY)
SNAPSHOT_SIZE = Gauge("snavio_snapshot_size_bytes", "Size of the last snapshot.", registry=REGISTRY)
SNAPSHOT_WRITE_DURATION = Histogram(
    "snavio_snapshot_write_duration_seconds", "Time to publish a snapshot.", buckets=_REFRESH, registry=REGISTRY
)
SNAPSHOTS_TOO_LARGE = Counter(
    "snavio_snapshot_too_large", "Snapshots not published because they exceed the size limit.", registry=REGISTRY
)

DEDUP_STRICT_MODE_USAGE = Counter(
    "snavio_dedup_strict_mode_usage", "Commands for routes with strict deduplication.", registry=REGISTRY
)
DEDUP_DUPLICATES_PREVENTED = Counter(
    "snavio_dedup_duplicates_prevented", "Duplicates found, by stage.", ["path"], registry=REGISTRY
)
DEDUP_ESCALATIONS = Counter(
    "snavio_dedup_escalations", "Commands escalated to the slow stage for deduplication.", registry=REGISTRY
)
DEDUP_SLOW_PATH_LATENCY = Histogram(
    "snavio_dedup_slow_path_latency_seconds",
    "Time from acceptance to the decision of the slow stage, for commands with strict deduplication.",
    buckets=_LATENCY,
    registry=REGISTRY,
)

LIMITS_EXCEEDED = Counter(
    "snavio_limits_exceeded",
    "Checks of a relaxed or shadow limit, which is counted after dispatch, that found it exceeded.",
    ["enforcement"],
    registry=REGISTRY,
)
WARM_PATH_BANS = Counter(
    "snavio_warm_path_bans", "Bans of a source from the fast stage of one dispatcher.", registry=REGISTRY
)
GLOBAL_BANS = Counter(
    "snavio_global_bans", "Bans of a source from the fast stage of all dispatchers.", registry=REGISTRY
)

TELEMETRY_EVENTS = Counter(
    "snavio_telemetry_events", "Events handed to telemetry queues.", ["event"], registry=REGISTRY
)
TELEMETRY_OLDEST = Gauge(
    "snavio_telemetry_oldest_seconds",
    "Age of the oldest telemetry that waits for its tenant, among the tenants of the last pass.",
    registry=REGISTRY,
)
TELEMETRY_DROPPED = Counter(
    "snavio_telemetry_dropped", "Events dropped by age from a telemetry queue without a consumer.", registry=REGISTRY
)

ALERTS = Counter("snavio_alerts", "Alerts opened.", ["event"], registry=REGISTRY)
ALERTS_UNROUTED = Counter(
    "snavio_alerts_unrouted",
    "Critical alerts without an e-mail address or a webhook.",
    ["event"],
    registry=REGISTRY,
)

ROUTES = Gauge("snavio_routes", "Routes with a queue, by health.", ["status"], registry=REGISTRY)

_MAX_LANES: Final = 1_000
_lanes: set[tuple[str, str]] = set()


def delivered(target: str, name: str, path: str, count: int = 1) -> None:
    """Counts deliveries of a lane. Each lane is a time series, so that only the first 1,000 get their own labels."""
    if (target, name) not in _lanes:
        if len(_lanes) >= _MAX_LANES:
            target = name = "other"
        else:
            _lanes.add((target, name))
    COMMANDS_DELIVERED.labels(target, name, path).inc(count)
