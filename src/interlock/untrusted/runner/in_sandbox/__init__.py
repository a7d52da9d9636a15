"""The code inside the walls, from the start of a process to the end of user code.

    launch.py      a fresh process: waits for a job, builds the walls; then the keeper: starts
                   the user process, waits, reports how it ended
    namespaces.py  namespaces, the file tree that user code sees, the platform's addresses in a private network
    job.py         the job that the process gets
    privileges.py  in the user process: limits, another user, no privileges, Landlock, refused system calls
    entry.py       runs the handler and reports its result; node_entry.cjs does for JavaScript

Uses only the standard library, Landlock and the task SDK: user code sees a copy of these few files and nothing else of
Interlock.
"""
