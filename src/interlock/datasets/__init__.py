"""Datasets: registry, lineage, files of attempts, credentials for objects; buffered datasets in `buffers/`.

Outputs of attempts become visible in tasks/dataset_changes.py, with the completion that reports them.
"""

PUBLIC = (
    "buffers.batch",
    "buffers.binary_copy",
    "buffers.shape",
    "build",
    "files",
    "registry",
)
"""Modules that other capabilities may import. tests/docs checks it."""
