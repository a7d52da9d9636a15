"""Examples of the OpenAPI document: requests and replies of the calls that create, watch and end large runs.

`src/interlock/http/openapi_examples.json` contains requests, written by hand, and replies, recorded from a gateway.
After a change, record the replies again and read the diff:

    .venv/bin/python -m tests.http.test_openapi_examples
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest

from interlock.http import openapi
from interlock.http.openapi import model
from interlock.stores.embedded import EmbeddedPostgres, EmbeddedValkey
from interlock.stores.postgres import migrate
from tests.support.staged_lists import Intake, intake

FILE = Path(openapi.__file__).with_name("openapi_examples.json")
CALLS = {
    "POST /v1/jobs": {"201", "202", "400", "401", "403", "404", "409", "415"},
    "POST /v1/uploads": {"201", "400"},
    "POST /v1/jobs/{job}/tasks": {"201", "409"},
    "POST /v1/jobs/{job}/close": {"200", "404"},
    "GET /v1/jobs/{job}": {"200", "404"},
    "GET /v1/jobs/{job}/tasks": {"200", "400"},
    "GET /v1/jobs/{job}/tasks/{index}": {"200", "404"},
    "POST /v1/jobs/{job}/rerun": {"201", "202", "404"},
    "POST /v1/jobs/{job}/pause": {"200", "404"},
    "POST /v1/jobs/{job}/resume": {"200", "404"},
    "POST /v1/jobs/{job}/cancel": {"200", "404"},
    "DELETE /v1/jobs/{job}": {"200", "404"},
    "POST /v1/jobs/{job}/exports": {"202", "409"},
    "GET /v1/jobs/{job}/exports/{export_id}": {"200", "404"},
    "GET /v1/jobs/{job}/receipt": {"200", "409"},
    "POST /v1/webhooks": {"201", "400"},
}
"""The calls with examples, and the statuses that each has an example of."""


@dataclass
class Scene:
    """Sends the examples in an order in which each finds the resources that it refers to."""

    site: Intake
    requests: dict[str, dict[str, Any]]
    replies: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    async def send(
        self,
        call: str,
        name: str,
        status: int,
        *,
        path: str | None = None,
        example: str | None = None,
        change: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Sends the named example. `change` replaces values that only this gateway knows."""
        method, template = call.split(" ")
        if example is not None:
            more["json"] = self.requests[call][example] | (change or {})
        reply: httpx.Response = await self.site.system.user(method, path or template, **more)
        assert reply.status_code == status, f"{call} {name}: {reply.text}"
        body: dict[str, Any] = reply.json()
        self.replies.setdefault(call, {}).setdefault(str(status), {})[name] = body
        return body

    async def play(self) -> None:
        await self._submitted()
        await self._opened()
        await self._controlled()
        await self._ended()
        await self._refused()

    async def _submitted(self) -> None:
        jobs = "POST /v1/jobs"
        await self.send(jobs, "small", 201, example="small", headers={"Idempotency-Key": "2026-11-15-crawl"})
        upload = await self.send("POST /v1/uploads", "one_part", 201, example="one_part")
        await self.send("POST /v1/uploads", "many_parts", 201, example="many_parts")
        await self.site.system.http.put(upload["url"], content=b'{"url": "https://example.com/1"}\n' * 3)
        source = self.requests[jobs]["staged"]["source"] | {"upload_id": upload["upload_id"]}
        source.pop("sha256")
        await self.send(jobs, "staged", 202, example="staged", change={"source": source})
        await self.send(jobs, "in_background", 202, example="in_background")

    async def _opened(self) -> None:
        await self.send("POST /v1/jobs", "open", 202, example="open")
        await self.send("POST /v1/jobs/{job}/tasks", "more", 201, path="/v1/jobs/readings/tasks", example="more")
        await self.send("POST /v1/jobs/{job}/close", "closed", 200, path="/v1/jobs/readings/close")
        await self.send("POST /v1/jobs/{job}/tasks", "closed", 409, path="/v1/jobs/readings/tasks", example="more")

    async def _controlled(self) -> None:
        for verb in ("pause", "resume"):
            await self.send(f"POST /v1/jobs/{{job}}/{verb}", "job", 200, path=f"/v1/jobs/crawl/{verb}")
        await self.send("GET /v1/jobs/{job}", "running", 200, path="/v1/jobs/crawl")
        await self.send("GET /v1/jobs/{job}/tasks", "queued", 200, path="/v1/jobs/crawl/tasks?status=Queued&limit=1")
        await self.send("GET /v1/jobs/{job}/receipt", "not_ended", 409, path="/v1/jobs/crawl/receipt")
        path = "/v1/jobs/crawl/exports"
        await self.send("POST /v1/jobs/{job}/exports", "not_ended", 409, path=path, example="parquet")

    async def _ended(self) -> None:
        system = self.site.system
        run = self.replies["POST /v1/jobs"]["201"]["small"]
        claims = (await system.claim_many(run_id=run["run_id"], start=0, end=1))["claims"]
        await system.complete(claims[0], result={"status": 200, "bytes": 1256})
        await system.complete(claims[1], "Failed", error_class="HttpError", error_message="404 Not Found")
        await system.settle()
        await self.send("GET /v1/jobs/{job}", "ended", 200, path="/v1/jobs/crawl")
        await self.send("GET /v1/jobs/{job}/tasks", "failed", 200, path="/v1/jobs/crawl/tasks?status=Failed")
        await self.send("GET /v1/jobs/{job}/tasks/{index}", "completed", 200, path="/v1/jobs/crawl/tasks/0")
        await self.send("GET /v1/jobs/{job}/receipt", "signed", 200, path="/v1/jobs/crawl/receipt")
        export = await self.send(
            "POST /v1/jobs/{job}/exports", "parquet", 202, path="/v1/jobs/crawl/exports", example="parquet"
        )
        path = f"/v1/jobs/crawl/exports/{export['export_id']}"
        await self.send("GET /v1/jobs/{job}/exports/{export_id}", "staging", 200, path=path)
        rerun = "POST /v1/jobs/{job}/rerun"
        await self.send(rerun, "failed", 201, path="/v1/jobs/crawl/rerun", example="failed")
        # Makes the run larger than the number of tasks that a request searches.
        await system.value("update interlock.runs set last_index = 900000 where run_id = $1::text::uuid", run["run_id"])
        change = {"run": run["run_id"]}
        await self.send(rerun, "all", 202, path="/v1/jobs/crawl/rerun", example="all", change=change)
        await self.send("POST /v1/jobs/{job}/cancel", "job", 200, path="/v1/jobs/crawl/cancel")
        await self.send("DELETE /v1/jobs/{job}", "job", 200, path="/v1/jobs/crawl")
        await self.send("POST /v1/webhooks", "ends", 201, example="ends")

    async def _refused(self) -> None:
        jobs = "POST /v1/jobs"
        await self.send(jobs, "out_of_bounds", 400, json=self.requests[jobs]["small"] | {"retention_days": 0})
        await self.send(jobs, "no_key", 401, example="small", headers={"Authorization": "Bearer ilk_none_none"})
        reader = await self.site.system.user("POST", "/v1/keys", json={"user": "someone", "role": "reader"})
        await self.send(jobs, "reader", 403, example="small", key=reader.json()["key"])
        await self.send(jobs, "no_upload", 404, example="staged")
        headers = {"Idempotency-Key": "2026-11-15-crawl"}
        await self.send(jobs, "key_reused", 409, example="in_background", headers=headers)
        await self.send(jobs, "not_json", 415, content=b"a,b", headers={"Content-Type": "text/csv"})
        await self.send("POST /v1/uploads", "no_parts", 400, json={"parts": 0})
        await self.send("GET /v1/jobs/{job}/tasks", "bad_status", 400, path="/v1/jobs/readings/tasks?status=Done")
        await self.send("POST /v1/webhooks", "no_url", 400, json={"name": "ends", "url": "ftp://example.com"})
        task = "/v1/jobs/readings/tasks/4711"
        await self.send("GET /v1/jobs/{job}/tasks/{index}", "no_task", 404, path=task)
        export = "/v1/jobs/readings/exports/00000000-0000-0000-0000-000000000001"
        await self.send("GET /v1/jobs/{job}/exports/{export_id}", "no_export", 404, path=export)
        for call in ("GET /v1/jobs/{job}", "DELETE /v1/jobs/{job}"):
            await self.send(call, "no_job", 404, path="/v1/jobs/unknown")
        for verb in ("close", "pause", "resume", "cancel"):
            await self.send(f"POST /v1/jobs/{{job}}/{verb}", "no_job", 404, path=f"/v1/jobs/unknown/{verb}")
        await self.send("POST /v1/jobs/{job}/rerun", "no_job", 404, path="/v1/jobs/unknown/rerun", json={})


async def played(site: Intake) -> Scene:
    scene = Scene(site, {call: given.get("requests", {}) for call, given in json.loads(FILE.read_text()).items()})
    await scene.play()
    return scene


@pytest.fixture
async def site(state_url: str, tmp_path: Path, valkey: EmbeddedValkey) -> AsyncIterator[Intake]:
    async with intake(state_url, tmp_path, valkey_url=await valkey.start()) as opened:
        yield opened


def shape(value: Any) -> Any:
    """Returns field names without values, and only the first item of lists: the part that is equal on every gateway."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    return [shape(inner) for inner in value[:1]] if isinstance(value, list) else None


async def test_every_example_is_answered_as_the_document_says(site: Intake) -> None:
    scene, documented = await played(site), json.loads(FILE.read_text())
    assert shape(scene.replies) == shape({call: given["replies"] for call, given in documented.items()})
    assert {call: set(replies) for call, replies in scene.replies.items()} == CALLS


async def test_served_document_has_them_and_they_are_valid(site: Intake) -> None:
    document = (await site.system.http.get(site.system.gateway_url + "/openapi.json")).json()
    for call, statuses in CALLS.items():
        method, path = call.split(" ")
        operation = document["paths"][path][method.lower()]
        body = operation.get("requestBody", {"content": {}})["content"]
        found = [(content, kind) for kind, content in body.items()]
        if method == "POST" and body:
            assert all(content["examples"] for content, _ in found), call
        for status in statuses:
            answers = operation["responses"][status]["content"]
            assert all(content["examples"] for content in answers.values()), f"{call} {status}"
            found += [(content, kind) for kind, content in answers.items()]
        for content, kind in found:
            check(document, content, f"{call} {kind}")


def check(document: dict[str, Any], content: dict[str, Any], where: str) -> None:
    name = content["schema"]["$ref"].rpartition("/")[2]
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    validator = jsonschema_rs.validator_for(schema)
    for title, example in content["examples"].items():
        problems = [str(error) for error in validator.iter_errors(example["value"])]
        assert not problems, f"{where} {title}: {problems}"
        msgspec.json.decode(json.dumps(example["value"]), type=model(name))


async def _write() -> None:
    with tempfile.TemporaryDirectory(prefix="interlock-examples-") as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres", name="examples", log=Path(folder) / "postgres.log")
        valkey = EmbeddedValkey(Path(folder) / "valkey", name="examples", log=Path(folder) / "valkey.log")
        url, valkey_url = await asyncio.gather(server.start(), valkey.start())
        try:
            await migrate(url)
            async with intake(url, Path(folder) / "home", valkey_url=valkey_url) as site:
                scene = await played(site)
        finally:
            await server.stop()
            await valkey.stop()
    documented = json.loads(FILE.read_text())
    for call in CALLS:
        documented.setdefault(call, {})["replies"] = scene.replies[call]
    FILE.write_text(json.dumps(documented, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    asyncio.run(_write())
