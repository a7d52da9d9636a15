"""Objects: files of datasets, batches, bundles and results, in a directory or in S3, by their full URI.

port.py        the interface of all adapters, and valid keys
directory.py   files in a directory; tree.py accesses them
s3.py          a bucket
"""

from __future__ import annotations

from interlock.stores.objects.directory import DirectoryObjects, OpenObject
from interlock.stores.objects.port import (
    LONGEST_SECONDS,
    Found,
    Method,
    Objects,
    SignUrl,
    canonical_key,
    canonical_prefix,
)
from interlock.stores.objects.s3 import SCHEME as _S3
from interlock.stores.objects.s3 import S3Objects, open_store

__all__ = [
    "LONGEST_SECONDS",
    "DirectoryObjects",
    "Found",
    "Method",
    "Objects",
    "OpenObject",
    "S3Objects",
    "SignUrl",
    "canonical_key",
    "canonical_prefix",
    "open_objects",
    "open_store",
]


def open_objects(
    root: str, *, endpoint: str | None = None, region: str | None = None, sign_url: SignUrl | None = None
) -> Objects:
    """Returns the adapter for a root. `sign_url` creates the URLs at which the gateway serves a directory."""
    if root.startswith(_S3):
        return S3Objects(root, endpoint=endpoint, region=region)
    return DirectoryObjects(root, sign_url)
