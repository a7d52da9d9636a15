"""Interlock dispatches data work as fenced, leased tasks kept in PostgreSQL."""

__version__ = "0.1.0"
