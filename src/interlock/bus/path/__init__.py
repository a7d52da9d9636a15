"""The path of a command: verify, decide, persist.

routes             POST /v1/commands
ingress            the three steps in the gateway, and its work that no command waits for
verification       the shield: protocol, timestamp, key and signature; `bulk_verification` does the same for a batch
fast_stage         decides from memory: route, ACL, bans, limits, deduplication
slow_stage         decides escalated commands from the registry and the authoritative counts
caches, limits     the registry and the tokens of limits in the memory of a dispatcher
fairness           shares of the sources of a lane
persistence        one statement that makes the decisions of a group of requests durable
delivery, reports  what a decision writes: the body for the target, the verdict, the telemetry event
"""
