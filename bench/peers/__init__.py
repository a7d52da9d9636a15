"""Other task queues on the same server, in the same run, each configured as its documentation recommends for speed.

Every peer has one process that creates tasks and some that work on them. Peers talk to PostgreSQL directly: no gateway,
no dispatcher, no HTTP in between. Interlock's run has five processes: client, gateway, dispatcher, worker and the
worker's child process. A peer gets the number of processes that is best for it, and never more than five. Tasks,
batches and requests in flight are the same: no-ops of `{"n": 1}`, created 1,000 at a time with four calls in flight.

    create   all tasks are created while no worker runs
    work     those tasks are worked off, timed from the first task that a handler sees
    whole    create and work concurrently with waiting workers, timed from the first call to the last end

A process counts the tasks its handler saw; the peer's own tables confirm that they ended.
"""
