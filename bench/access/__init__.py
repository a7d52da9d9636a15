"""Cost of access control, each part compared with its limit: `python -m bench.access`.

tokens    issues and verifies capability tokens, compared with bare ES256 over the same bytes
query     the query service over HTTP, compared with bare DuckDB on the same files
sink      loads published batches, compared with bare COPY and INSERT of the same rows
site      the deployed DAG, the attempts that query and publish, and the parts that run in-process to be timed
program   the measurements, their order, and the table
"""
