"""The files of the dashboard, below /ui/: a page and its assets, without any data.

Paths are looked up among the files that exist, so no path leads out of the folder. Assets have a hash of their content
in their name and never change; the page refers to them and is never cached.
"""

from __future__ import annotations

import gzip
import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from litestar import Response, get
from litestar.params import FromPath
from litestar.response import Redirect

import interlock
from interlock.errors import NotFound
from interlock.http.requests import Http

FOLDER: Final = Path(interlock.__file__).parent / "web" / "static"
INDEX: Final = "index.html"
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_ASSETS: Final = "assets/"
_OBJECTS: Final = ("run", "task", "job", "dag", "backfill", "dataset", "operation")
"""Pages of one object, such as /ui/job/crawl.v2: names may contain dots."""
_FOREVER: Final = "public, max-age=31536000, immutable"
_TYPES: Final = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".woff2": "font/woff2",
    ".map": "application/json",
}
_COMPRESSED: Final = (".html", ".js", ".mjs", ".css", ".svg", ".json", ".map", ".txt")
_NOT_BUILT: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Interlock</title>
<h1>The dashboard is not built</h1>
<p>This checkout contains its source only. Run <code>make ui</code>, then reload this page.</p>
<p>The API works without it: see <a href="/openapi.json">/openapi.json</a>.</p>
</html>
"""


@dataclass(frozen=True)
class File:
    body: bytes
    compressed: bytes | None
    media_type: str
    cache: str


class Bundle:
    """The files in memory. They are read again when the page changes, as it does with every build."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._built: int | None = None
        self._files: dict[str, File] = {}

    def find(self, path: str) -> File | None:
        """Returns a file; for a path of the page's own, which has no extension or names an object, the page."""
        self._refresh()
        folder, _, last = path.rpartition("/")
        name = path if path.startswith(_ASSETS) or ("." in last and folder not in _OBJECTS) else INDEX
        return self._files.get(name)

    def _refresh(self) -> None:
        try:
            built = (self._folder / INDEX).stat().st_mtime_ns
        except FileNotFoundError:
            built, self._files = None, {}
        if built not in (None, self._built):
            found = [file for file in self._folder.rglob("*") if file.is_file() and not file.is_symlink()]
            self._files = {file.relative_to(self._folder).as_posix(): _read(self._folder, file) for file in found}
        self._built = built


def _read(folder: Path, file: Path) -> File:
    body, name = file.read_bytes(), file.relative_to(folder).as_posix()
    media_type = _TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return File(
        body=body,
        compressed=gzip.compress(body, mtime=0) if file.suffix in _COMPRESSED else None,
        media_type=media_type,
        cache=_FOREVER if name.startswith(_ASSETS) else "no-store",
    )


_bundle: Final = Bundle()


@get("/", status_code=307, include_in_schema=False)
async def to_dashboard(request: Http) -> Redirect:
    """Redirects browsers to the dashboard, and programs to the description of the API."""
    is_browser = "text/html" in request.headers.get("accept", "")
    return Redirect("/ui/" if is_browser else "/openapi.json", status_code=307)


@get("/ui", include_in_schema=False)
async def dashboard_page(request: Http) -> Response[bytes]:
    return _served(request, INDEX)


@get("/ui/{file:path}", include_in_schema=False)
async def dashboard_file(request: Http, file: FromPath[Path]) -> Response[bytes]:
    return _served(request, file.as_posix().lstrip("/"))


def _served(request: Http, path: str) -> Response[bytes]:
    found = _bundle.find(path)
    if found is None and _bundle.find("") is None:
        return Response(_NOT_BUILT.encode(), status_code=503, media_type="text/html", headers=HEADERS)
    if found is None:
        raise NotFound(f"The dashboard has no file {path!r}.")
    headers = HEADERS | {"Cache-Control": found.cache, "Vary": "Accept-Encoding"}
    if found.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.compressed, media_type=found.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(found.body, media_type=found.media_type, headers=headers)


HANDLERS = [to_dashboard, dashboard_page, dashboard_file]
