"""The kernel: the life of a task from its queue to its end. See docs/task-states.md."""

PUBLIC = (
    "actions",
    "build",
    "claims",
    "completion",
    "dataset_changes",
    "effects",
    "idempotency",
    "inline_runtime",
    "limits",
    "operators",
    "outbox_relay",
    "overview",
    "queue",
    "reads",
    "result_packs",
    "runs",
    "shards",
    "triggers",
)
"""Modules that other capabilities may import. tests/docs checks it."""
