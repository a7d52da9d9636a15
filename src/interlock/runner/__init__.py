"""The runner: executes bundles of users' code, one confined process per invocation.

    contract.py      what a dispatcher asks and is told
    server.py        POST /invoke, and the process around it
    invoking.py      one invocation: bundle, place, process, verdict
    places.py        how many run at once, and as whom
    bundles.py       bundles by their SHA-256, unpacked where user code cannot write
    confinement.py   which walls this machine has, and what stands inside of them
    sandbox.py       one confined process: start it, tell it its job, hear of its end, end it
    forward.py       connections from inside to the platform, and to nowhere else
    proxy.py         the requests on them: task paths and objects, written anew
    groups.py        control groups, where they can be had: limits over all processes of an invocation
    verdict.py       how it ended, in words
    inside/          what runs on the far side of the wall

It holds no credential but the secret that it shares with its dispatchers, and reaches no store.
"""
