"""Settings of an embedded PostgreSQL: for a small machine, the churn of queues, and no secrets in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Final

HOST_AUTHENTICATION: Final = """\
# Written by Interlock at every start. The superuser has no password, so nobody can log in as superuser.
host all all 127.0.0.1/32 scram-sha-256
"""

_TEMPLATE: Final = """\
# Written by Interlock at every start. Put your own settings below the include line in data/postgresql.conf.
listen_addresses = '127.0.0.1'
port = {port}
unix_socket_directories = ''
hba_file = {hba_file}
cluster_name = {cluster_name}
max_connections = 100
max_locks_per_transaction = 128

shared_buffers = {shared_buffers}MB
effective_cache_size = {effective_cache_size}MB
random_page_cost = 1.1
jit = off

fsync = on
synchronous_commit = on
wal_compression = on
max_wal_size = 2GB
checkpoint_timeout = 15min

# Rows of queues die within seconds: vacuum in small steps, often and without long pauses.
autovacuum_naptime = 15s
autovacuum_vacuum_scale_factor = 0.05
autovacuum_analyze_scale_factor = 0.05
autovacuum_vacuum_cost_limit = 2000

timezone = 'UTC'
log_timezone = 'UTC'

# Log neither statements nor row values in error details: both may contain secrets.
log_destination = 'stderr'
logging_collector = off
log_line_prefix = '%m [%p] '
log_min_messages = warning
log_min_error_statement = panic
log_error_verbosity = terse
log_statement = 'none'
log_min_duration_statement = -1
log_checkpoints = off
log_lock_waits = off
log_autovacuum_min_duration = -1
"""


def render(*, port: int, hba_file: Path, cluster_name: str, memory_mib: int) -> str:
    return _TEMPLATE.format(
        port=port,
        hba_file=_quoted(str(hba_file)),
        cluster_name=_quoted(cluster_name),
        shared_buffers=max(16, min(256, memory_mib // 8)),
        effective_cache_size=max(64, memory_mib // 4),
    )


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"
