"""HTTP requests to addresses chosen by users: URLs of tasks and of webhooks.

    guard       addresses that may be reached, the exceptions that the operator allows, and the errors
    exchange    one exchange with a checked address, limited in time and size; checks each hop of a redirect

The address is checked on every connection, at the point of connecting, so DNS rebinding gains nothing. `exchange` loads
aiohttp; only modules that send import it, because the settings also import this package.
"""

from interlock.outbound.guard import Exceptions, Guard

__all__ = ["Exceptions", "Guard"]
