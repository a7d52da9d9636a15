"""Tools for development: a chain to develop against."""

PUBLIC: tuple[str, ...] = ()
"""Modules that other capabilities may import: none."""
