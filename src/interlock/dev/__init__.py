"""Tools for development: a chain to develop against."""
