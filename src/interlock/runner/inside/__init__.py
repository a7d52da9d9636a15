"""What runs on the far side of the wall, from the start of a process to the end of a user's code.

    launch.py      a fresh process: waits for work, makes the walls, starts the keeper
    walls.py       namespaces and the file tree that user code sees
    network.py     the platform's addresses inside a network of its own
    keeper.py      the first process inside: starts the user's process, waits, says how it ended
    drop.py        in the user's process: limits, another user, no privileges, Landlock, system calls
    syscalls.py    which system calls are refused
    entry.py       runs the handler, and reports what it returned

Standard library alone, and nothing else of Interlock but Landlock and the task SDK: a copy of these few files is all
that user code can see of it.
"""
