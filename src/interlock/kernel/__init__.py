"""The task lifecycle: submission, leases, fences, retries, outbox and queues. See docs/task-states.md."""
