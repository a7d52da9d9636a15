"""The Python SDK.

`Client` and `QueryClient` are for users, `WorkerClient` is for workers, and `TaskClient` is for the code of one
attempt. Bodies are the structs of `interlock.wire`; errors are the classes of `interlock.errors`.
"""

from interlock.client._datasets import QueryClient, QueryOptions
from interlock.client._dispatcher import Ending, Fence, TaskClient, WorkerClient
from interlock.client._gateway import Client, JobOptions, TaskFilter
from interlock.client._locate import Access, dispatcher_access, gateway_access, query_access
from interlock.client._webhooks import verify_webhook

__all__ = [
    "Access",
    "Client",
    "Ending",
    "Fence",
    "JobOptions",
    "QueryClient",
    "QueryOptions",
    "TaskClient",
    "TaskFilter",
    "WorkerClient",
    "dispatcher_access",
    "gateway_access",
    "query_access",
    "verify_webhook",
]
