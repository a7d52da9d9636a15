"""Exit codes by which a child process says why it ended."""

EXIT_ORPHANED = 75
"""The wrapper is gone."""
EXIT_OUT_OF_MEMORY = 76
"""Not even its own bookkeeping found memory."""
EXIT_SPARK_DIED = 77
"""The JVM below a driver is gone."""
