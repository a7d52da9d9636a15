"""`block_follower`: reads an EVM chain over JSON-RPC and writes it to tables of the data database.

rpc        JSON-RPC calls in batches, with retries
chain      blocks with their logs, consistent with one branch of the chain
rows       conversion of blocks to records for each output
store      the data database: rows, position, the fence, and events that are not yet emitted
following  the loop: read, write, emit events, and roll back after a reorg
operator   the operator: runs the loop in a thread and connects it to the platform
"""
