"""Operators on Spark that ship with the platform; docs/built-in-operators.md says how each is used.

    erc20_transfers   token transfers of logs                  uint256      256-bit numbers, exactly
    rollup            counts and sums by time and key
    dedupe            one row for each key
    parquet_compact   many files as one, in order
    sql               a SELECT over the inputs                 sql_gate     what such a SELECT may say
    batch_query       a query that somebody asked, exported
    integrity_check   what does not fit together
    block_ingest      a range of a chain over JSON-RPC         chain_rows   the chain, asked by executors

They are loaded when a task names them.
"""
