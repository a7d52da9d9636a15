"""Where Spark's Python workers on this machine come from: a process that has loaded what they need, and is forked.

Without it each of them loads Arrow, pandas and our own modules for itself, which takes a second of a core.
"""

from __future__ import annotations

import pandas  # noqa: F401 - loaded to be there
from pyspark import daemon, worker  # noqa: F401

from interlock.pipeline import partition_file, tables  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
