"""All settings, as one typed object.

A value comes from, in this order: the command line, `INTERLOCK_…` in the environment, `interlock.toml` in the working
directory (or the file named by `INTERLOCK_CONFIG`), the default. `interlock config` prints each with its origin.

    stores      where the databases, Valkey and objects are
    listeners   where servers listen, and where clients find them
    access      capability tokens, credentials for objects, users of an identity provider
    tasks       jobs and tasks, their runtimes, queues
    loops       loops of the dispatcher, the sink, workers
    outbound    what URLs of users may lead to; webhooks
    bus         the command bus
    runner      bundles and the runner of untrusted code
    queries     the query service
    spark       the session of a Spark worker
    whole       `Settings`, which is all of them
    loading     reads them, and says where each came from
"""

from interlock.settings.area import host_of, is_loopback, is_wildcard
from interlock.settings.loading import load, origins
from interlock.settings.runtimes import BUFFER_QUEUE, BUILT_IN_RUNTIMES, INGEST_QUEUE, Runtime, RuntimeKind
from interlock.settings.whole import CONFIG_ENV, DEFAULT_CONFIG, Settings, config_file

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
