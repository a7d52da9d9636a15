"""Other task queues on the same server, in the same run, each as strong as its documentation makes it.

Every peer has one process that creates tasks and some that work them, and speaks to PostgreSQL directly: no gateway, no
dispatcher, no HTTP between. Interlock's run has five processes: client, gateway, dispatcher, worker and the worker's
child; a peer gets as many as are best for it, and never more. Tasks, batches and requests in flight are the same:
no-ops of `{"n": 1}`, made 1,000 at a time with four calls in flight.

    create   all tasks in, while nobody works
    work     those tasks worked to their end, clocked from the first that a handler sees
    whole    create and work at once: the workers wait, clocked from the first call to the last end

A process counts what its handler saw; the peer's own tables say that it ended.
"""
