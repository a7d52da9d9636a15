"""Outgoing webhooks: registration, events of runs, delivery with retries."""

PUBLIC: tuple[str, ...] = ()
"""Modules that other capabilities may import: none."""
