"""The runner: executes bundles of user code, one confined process per invocation.

    contract.py      the request of a dispatcher
    server.py        POST /invoke, and the server process
    invocation.py    one invocation: slot, bundle, process, report; the slots, and the users that they run as
    bundles.py       bundles by SHA-256, unpacked where user code cannot write
    confinement.py   which walls this machine supports, and what is inside them; the zip of the Lambda function
    sandbox.py       one confined process: start it, send its job, wait for its end, kill it
    forwarder.py     connections from user code to the platform, and to no other address; checks their requests
    cgroups.py       control groups, where available: limits on all processes of an invocation together
    in_sandbox/      the code that runs inside the sandbox

    lambda_function.py   the runner as an AWS Lambda function

Its only credential is the secret that it shares with its dispatchers. It has no access to any store.
"""
