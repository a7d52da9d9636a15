"""HTTP requests to addresses chosen by users: URLs of tasks and of webhooks.

    addresses   addresses that may be reached, and the exceptions that the operator allows
    guard       resolves a host and checks all its addresses
    sending     one exchange with a checked address, limited in time and size; checks each hop of a redirect
    bodies      response bodies, decompressed only up to a limit
    failures    the errors

The address is checked on every connection, at the point of connecting, so DNS rebinding gains nothing. `sending` loads
aiohttp; only modules that send import it, because the settings also import this package.
"""

from interlock.outbound.addresses import Exceptions
from interlock.outbound.guard import Guard

__all__ = ["Exceptions", "Guard"]
