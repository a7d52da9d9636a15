"""`block_follower`: reads an EVM chain over JSON-RPC and writes it to tables of the data database.

rpc        JSON-RPC calls in batches, with retries
chain      blocks with their logs, consistent with one branch of the chain, and their conversion to records
store      the data database: rows, position, the fence, and events that are not yet emitted
operator   the operator: its loop reads, writes, emits events and rolls back after a reorg; runs in a thread
"""
