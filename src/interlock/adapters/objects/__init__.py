"""Objects: files of datasets, batches, bundles and results, in a directory or in S3, by their full URI.

port.py        what every adapter does
keys.py        which keys there are
directory.py   files below a directory; tree.py walks it, uploads.py has what is not an object yet
s3.py          a bucket
"""

from __future__ import annotations

from interlock.adapters.objects.directory import DirectoryObjects, OpenObject
from interlock.adapters.objects.keys import canonical_key, canonical_prefix
from interlock.adapters.objects.port import LONGEST_SECONDS, Found, Method, Objects, SignUrl
from interlock.adapters.objects.s3 import SCHEME as _S3
from interlock.adapters.objects.s3 import S3Objects, open_store

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
    """The adapter of a root. `sign_url` makes the URLs under which the gateway serves a directory."""
    if root.startswith(_S3):
        return S3Objects(root, endpoint=endpoint, region=region)
    return DirectoryObjects(root, sign_url)
