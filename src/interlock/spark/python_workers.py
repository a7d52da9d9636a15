"""The daemon that forks Spark's Python workers on this machine, with their modules already loaded.

Without it, each worker loads Arrow, pandas and our own modules itself, which takes one second of CPU time.
"""

from __future__ import annotations

import pandas  # noqa: F401 - imported so that forked workers have it
from pyspark import daemon, worker  # noqa: F401

from interlock.spark import partition_file, tables  # noqa: F401

if __name__ == "__main__":
    daemon.manager()
