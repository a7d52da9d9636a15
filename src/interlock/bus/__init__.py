"""The command bus: signed commands between services, the rules that they pass, and the telemetry about them."""

PUBLIC: tuple[str, ...] = ()
"""Modules that other capabilities may import: none."""
