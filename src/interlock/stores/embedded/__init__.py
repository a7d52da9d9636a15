"""Embedded PostgreSQL and Valkey servers, installed from PyPI, with their data in our folder.

Each server has its own folder and outlives the process that started it: after a SIGKILL, the next `start()` in that
folder finds the running server and adopts it.
"""

from interlock.stores.embedded.postgres import EmbeddedPostgres
from interlock.stores.embedded.server import EmbeddedServer, EmbeddedServerError
from interlock.stores.embedded.valkey import EmbeddedValkey

__all__ = ["EmbeddedPostgres", "EmbeddedServer", "EmbeddedServerError", "EmbeddedValkey"]
