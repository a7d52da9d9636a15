"""Spark operators that ship with the platform; docs/built-in-operators.md describes their use.

    erc20_transfers   token transfers decoded from logs        uint256      exact 256-bit numbers
    rollup            counts and sums by time and key
    dedupe            one row per key
    parquet_compact   many files merged into one, sorted
    sql               a SELECT over the inputs                 sql_gate     the SQL that such a SELECT may use
    batch_query       a query of a user, exported to files
    integrity_check   inconsistencies in stored data
    block_ingest      a range of a chain over JSON-RPC         chain_rows   the RPC calls made by executors

A module is loaded when a task names its operator.
"""
