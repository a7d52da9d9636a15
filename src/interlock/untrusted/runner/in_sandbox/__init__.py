"""The code inside the walls, from the start of a process to the end of user code.

    launch.py      a fresh process: waits for a job, builds the walls, starts the keeper
    namespaces.py  namespaces, and the file tree that user code sees
    network.py     the platform's addresses inside a private network
    keeper.py      the first process inside: starts the user process, waits, reports how it ended
    job.py         the job that the process gets
    privileges.py  in the user process: limits, another user, no privileges, Landlock, refused system calls
    entry.py       runs the handler and reports its result; node_entry.cjs does for JavaScript

Uses only the standard library, Landlock and the task SDK: user code sees a copy of these few files and nothing else of
Interlock.
"""
