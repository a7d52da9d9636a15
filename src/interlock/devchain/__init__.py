"""A development chain: an EVM JSON-RPC server whose blocks, transactions, logs and reorgs all follow from a seed.

    blocks.py      what a block holds: Ethereum's JSON objects
    contents.py    writes a block's transactions and logs from (seed, number, branch)
    chain.py       which block stands at which height: mining, reorgs, finality
    filters.py     which logs eth_getLogs means
    methods.py     the methods, and what they take
    rpc.py         JSON-RPC 2.0: calls, batches, notifications, errors
    server.py      HTTP, and the miner that adds a block every few seconds

Nothing of it depends on the rest of Interlock, and nothing but the command line depends on it.
"""
