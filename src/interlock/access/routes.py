"""Endpoints of the gateway for principals: keys, worker tokens, orgs, members, secrets and signing keys."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from litestar import delete, get, post, put
from litestar.params import FromPath, JSONBody, QueryParameter

from interlock.access.build import access_of
from interlock.access.guards import principal_of, user_guard
from interlock.access.principals import PLATFORM
from interlock.errors import BadRequest, ConfigurationError, Conflict
from interlock.http.requests import Cursor, Http, Limit, settings_of
from interlock.wire.access import (
    KeyCreated,
    KeyList,
    KeyRequest,
    KeyView,
    MemberPage,
    MemberRequest,
    MemberView,
    OrgRequest,
    OrgSecretPage,
    OrgSecretRequest,
    OrgSecretView,
    OrgView,
    SigningKeyView,
    WorkerTokenCreated,
    WorkerTokenList,
    WorkerTokenRequest,
    WorkerTokenView,
)

Subject = Annotated[str, QueryParameter(name="subject", min_length=1, max_length=255, description="user to remove")]
Org = Annotated[
    str | None,
    QueryParameter(
        name="org",
        required=False,
        min_length=1,
        max_length=200,
        description="an org other than yours; requires the platform scope",
    ),
]


@get("/v1/members", guards=[user_guard], opt={"scope": "admin"}, summary="Members of the org")
async def list_members(request: Http, org: Org = None, cursor: Cursor = None, limit: Limit = 100) -> MemberPage:
    return await access_of(request).principals.members.page(await _org(request, org), cursor, limit)


@post(
    "/v1/members",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Add a user of the identity provider, or change their role",
)
async def allow_member(request: Http, data: JSONBody[MemberRequest]) -> MemberView:
    org_id = await _org(request, data.org)
    return await access_of(request).principals.members.allow(data, org_id, by=principal_of(request))


@delete(
    "/v1/members",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Remove a user; takes effect immediately",
)
async def disallow_member(request: Http, subject: Subject, org: Org = None) -> MemberView:
    return await access_of(request).principals.members.disallow(subject, await _org(request, org))


async def _org(request: Http, name: str | None) -> UUID:
    caller = principal_of(request)
    if name is None or name == caller.org:
        return caller.org_id
    caller.require(PLATFORM)
    return (await access_of(request).principals.org(name)).org_id


@put(
    "/v1/secrets/{secret:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    summary="Set a secret, or replace its value",
    description="Configs of the org's jobs reference it as `${secret:NAME}`. `hosts` replaces the previous hosts. "
    "The value is stored encrypted, and no endpoint returns it.",
)
async def set_secret(request: Http, secret: FromPath[str], data: JSONBody[OrgSecretRequest]) -> OrgSecretView:
    return await access_of(request).secrets.set(secret, data, principal_of(request))


@get("/v1/secrets", guards=[user_guard], opt={"scope": "admin"}, summary="Secrets by name, without their values")
async def list_secrets(request: Http, cursor: Cursor = None, limit: Limit = 100) -> OrgSecretPage:
    return await access_of(request).secrets.page(principal_of(request).org_id, cursor, limit)


@delete(
    "/v1/secrets/{secret:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Remove a secret; tasks that reference it then fail",
)
async def remove_secret(request: Http, secret: FromPath[str]) -> OrgSecretView:
    return await access_of(request).secrets.remove(secret, principal_of(request))


@get("/v1/keys", guards=[user_guard], opt={"scope": "admin"}, summary="API keys of the org")
async def list_keys(request: Http) -> KeyList:
    return KeyList(keys=await access_of(request).principals.keys(principal_of(request).org_id))


@post("/v1/keys", guards=[user_guard], opt={"scope": "admin"}, summary="Create an API key; it is shown once")
async def create_key(request: Http, data: JSONBody[KeyRequest]) -> KeyCreated:
    caller, principals = principal_of(request), access_of(request).principals
    org_id = caller.org_id
    if data.org is not None and data.org != caller.org:
        caller.require(PLATFORM)
        org_id = (await principals.org(data.org)).org_id
    return await principals.create_key(data, org_id, granted_by=caller)


@delete(
    "/v1/keys/{key_id:str}",
    guards=[user_guard],
    opt={"scope": "admin"},
    status_code=200,
    summary="Revoke a key",
)
async def revoke_key(request: Http, key_id: FromPath[str]) -> KeyView:
    return await access_of(request).principals.revoke_key(key_id, principal_of(request).org_id)


@get("/v1/worker-tokens", guards=[user_guard], opt={"scope": PLATFORM}, summary="Worker tokens")
async def list_worker_tokens(request: Http) -> WorkerTokenList:
    return WorkerTokenList(tokens=await access_of(request).principals.worker_tokens())


@post(
    "/v1/worker-tokens",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Create a worker token; it is shown once",
)
async def create_worker_token(request: Http, data: JSONBody[WorkerTokenRequest]) -> WorkerTokenCreated:
    known = settings_of(request).runtime_names
    for runtime in data.runtimes or []:
        if runtime not in known:
            raise BadRequest(f"Unknown runtime {runtime!r}; choose from: {', '.join(known)}.", code="unknown_runtime")
    return await access_of(request).principals.create_worker_token(data)


@delete(
    "/v1/worker-tokens/{token_id:str}",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    status_code=200,
    summary="Revoke a worker token; workers notice within seconds",
)
async def revoke_worker_token(request: Http, token_id: FromPath[str]) -> WorkerTokenView:
    return await access_of(request).principals.revoke_worker_token(token_id)


@post("/v1/orgs", guards=[user_guard], opt={"scope": PLATFORM}, summary="Create an org")
async def create_org(request: Http, data: JSONBody[OrgRequest]) -> OrgView:
    return await access_of(request).principals.create_org(data.name)


@get("/v1/signing-keys", guards=[user_guard], opt={"scope": PLATFORM}, summary="Keys that sign capability tokens")
async def list_signing_keys(request: Http) -> list[SigningKeyView]:
    return await access_of(request).keyring.keys()


@post(
    "/v1/signing-keys/rotate",
    guards=[user_guard],
    opt={"scope": PLATFORM},
    summary="Rotate the signing key",
)
async def rotate_signing_key(request: Http) -> SigningKeyView:
    try:
        return await access_of(request).keyring.rotate()
    except ConfigurationError as error:
        raise Conflict(error.detail, code="unfit_signing_key") from error


@get("/internal/jwks/task", summary="Public keys that verify capability tokens")
async def jwks(request: Http) -> dict[str, list[dict[str, Any]]]:
    return {"keys": await access_of(request).keyring.jwks()}


HANDLERS = [
    list_members,
    allow_member,
    disallow_member,
    set_secret,
    list_secrets,
    remove_secret,
    list_keys,
    create_key,
    revoke_key,
    list_worker_tokens,
    create_worker_token,
    revoke_worker_token,
    create_org,
    list_signing_keys,
    rotate_signing_key,
]


DISPATCHER_HANDLERS = [
    jwks,
]
