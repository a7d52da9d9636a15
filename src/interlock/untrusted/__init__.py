"""Untrusted code: bundles, their invocation, and the runner with its sandbox in `runner/`."""

PUBLIC = ("bundles",)
"""Modules that other capabilities may import. tests/docs checks it."""
