"""The runner: executes bundles of user code, one confined process per invocation.

    contract.py      the request of a dispatcher
    server.py        POST /invoke, and the server process
    invoking.py      one invocation: slot, bundle, process, verdict
    places.py        slots: how many invocations run concurrently, and as which users
    bundles.py       bundles by SHA-256, unpacked where user code cannot write
    confinement.py   which walls this machine supports, and what is inside them
    sandbox.py       one confined process: start it, send its job, wait for its end, kill it
    forward.py       connections from user code to the platform, and to no other address
    proxy.py         the requests on them: task paths and objects, parsed and checked
    groups.py        control groups, where available: limits on all processes of an invocation together
    verdict.py       the report on how the process ended
    inside/          the code that runs inside the walls

Its only credential is the secret that it shares with its dispatchers. It has no access to any store.
"""
