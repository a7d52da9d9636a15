"""HTTP to addresses that somebody else has chosen: URLs of tasks, of webhooks.

    addresses   which addresses may be reached, and the exceptions that an installation makes
    guard       a name to addresses, all of them checked
    sending     one exchange with a checked address, bounded in time and size; redirects, each hop checked
    bodies      what a reply says, unpacked no further than allowed
    failures    how it fails

An address is checked where it is connected to, on every connection, so that a name which leads elsewhere a moment later
gains nothing. `sending` loads aiohttp and is imported by those who send: settings import this package, too.
"""

from interlock.outbound.addresses import Exceptions
from interlock.outbound.guard import Guard

__all__ = ["Exceptions", "Guard"]
