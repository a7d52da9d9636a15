"""`block_follower`: an EVM chain, read over JSON-RPC, as rows of the data database.

rpc        calls in batches, asked again until they are answered
chain      blocks with their logs, as one branch of the chain has them
rows       what becomes of them: columns by output
store      the data database: rows, how far they go, who may write, what is not yet announced
following  the loop: read, write, announce, and go back where the chain did
operator   the operator itself: the loop in a thread, the platform in front of it
"""
