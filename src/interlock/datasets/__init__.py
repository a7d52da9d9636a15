"""Datasets: registry, lineage, files of attempts, credentials for objects; buffered datasets in `buffers/`."""

PUBLIC = (
    "buffers.batch",
    "buffers.binary_copy",
    "buffers.shape",
    "build",
    "files",
    "registry",
)
"""Modules that other capabilities may import. tests/docs checks it."""
