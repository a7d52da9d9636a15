"""What access control costs, each part beside its limit: `python -m bench.access`.

tokens    capability tokens issued and verified, beside bare ES256 over the same bytes
query     the query service over HTTP, beside bare DuckDB on the same files
sink      published batches made rows, beside bare COPY and INSERT of the same rows
site      the deployed DAG, the attempts that ask and publish, and the parts that are run here to be timed
program   what is measured, in which order, and the table
"""
