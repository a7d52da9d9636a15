"""All settings, as one typed object.

A value comes from the first of these that sets it: the command line, an `INTERLOCK_…` environment variable,
`interlock.toml` in the working directory (or the file named by `INTERLOCK_CONFIG`), the default. `interlock config`
prints each setting with its origin.

    stores      databases, Valkey, object store
    listeners   addresses and limits of servers, and the URLs that clients use
    access      capability tokens, object store credentials, users of an identity provider
    tasks       jobs, tasks, runtimes, queues
    loops       loops of the dispatcher, the sink, workers
    outbound    hosts that user-provided URLs may reach; webhooks
    bus         the command bus
    runner      bundles and the runner for untrusted code
    queries     the query service
    spark       the session of a Spark worker
    whole       `Settings`, which combines all of them
    loading     loads the settings and reports the origin of each value
"""

from interlock.settings.base import host_of, is_loopback, is_wildcard
from interlock.settings.settings import CONFIG_ENV, DEFAULT_CONFIG, Settings, config_file, load, origins
from interlock.settings.tasks import BUFFER_QUEUE, BUILT_IN_RUNTIMES, INGEST_QUEUE, Runtime, RuntimeKind

__all__ = [
    "BUFFER_QUEUE",
    "BUILT_IN_RUNTIMES",
    "CONFIG_ENV",
    "DEFAULT_CONFIG",
    "INGEST_QUEUE",
    "Runtime",
    "RuntimeKind",
    "Settings",
    "config_file",
    "host_of",
    "is_loopback",
    "is_wildcard",
    "load",
    "origins",
]
