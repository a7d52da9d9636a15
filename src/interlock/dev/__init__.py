"""A development chain: an EVM JSON-RPC server whose blocks, transactions, logs and reorgs are derived from a seed.

    blocks.py      Ethereum's JSON objects: blocks, transactions, receipts, logs
    contents.py    generates a block's transactions and logs from (seed, number, branch)
    chain.py       the canonical chain: mining, reorgs, finality
    methods.py     the RPC methods, their parameters, and the log filter of eth_getLogs
    rpc.py         JSON-RPC 2.0: calls, batches, notifications, errors
    server.py      HTTP, and the miner that adds a block every few seconds

It shares only errors and the HTTP server with the rest of Interlock, and only the command line uses it.
"""

PUBLIC: tuple[str, ...] = ()
"""Modules that other capabilities may import: none."""
