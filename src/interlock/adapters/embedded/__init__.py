"""PostgreSQL and Valkey servers that come from PyPI packages and live in a folder of ours.

Each server has a folder of its own, and outlives the process that started it: after a SIGKILL the next
`start()` on that folder finds the running server and takes it over.
"""

from interlock.adapters.embedded.postgres import EmbeddedPostgres
from interlock.adapters.embedded.server import EmbeddedServer, EmbeddedServerError
from interlock.adapters.embedded.valkey import EmbeddedValkey

__all__ = ["EmbeddedPostgres", "EmbeddedServer", "EmbeddedServerError", "EmbeddedValkey"]
