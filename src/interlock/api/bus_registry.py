"""The registry of the command bus over HTTP: services, routes, ACLs, limits, keys, and their changelog."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, delete, get, post
from litestar.datastructures import State
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from interlock.access.principals import SEND
from interlock.api.auth import kernel_of, principal_of, user_guard
from interlock.bus.changelog import Registrar
from interlock.bus.entries import ACL, LIMIT, ROUTE, SERVICE
from interlock.kernel.reads import MAX_PAGE
from interlock.wire import (
    AclPage,
    AclRequest,
    ChangePage,
    LimitPage,
    LimitRequest,
    RegistryChange,
    RegistryKind,
    RoutePage,
    RouteRequest,
    RouteTrial,
    RouteTrialRequest,
    RouteView,
    ServiceKeyPage,
    ServiceKeyRequest,
    ServiceKeyView,
    ServicePage,
    ServiceRequest,
    ServiceView,
    TenantConfig,
)

READ, WRITE, ADMIN = "registry:read", "registry:write", "admin"
"""Who may send, and with which secret, is an admin's to say."""

Http = Request[Any, Any, State]
DryRun = Annotated[
    bool, QueryParameter(name="dry_run", description="say what would change, by every rule, and change nothing")
]
Target = Annotated[
    str | None, QueryParameter(name="target", required=False, max_length=64, description="only of this target")
]
Cursor = Annotated[
    str | None,
    QueryParameter(name="cursor", required=False, max_length=400, description="next_cursor of the last page"),
]
Limit = Annotated[int, QueryParameter(name="limit", ge=1, le=MAX_PAGE, description="most items on the page")]


def registrar_of(request: Http) -> Registrar:
    principal = principal_of(request)
    return Registrar(principal.org_id, principal.org, principal.user)


# Services


@post(
    "/v1/services",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Register a service, or change one",
    description="A new one gets its first key with it. Its producers find that in `/v1/tenant-config`.",
)
async def put_service(request: Http, data: JSONBody[ServiceRequest], dry_run: DryRun = False) -> RegistryChange:
    return await kernel_of(request).bus_registry.put(SERVICE, data, registrar_of(request), dry_run=dry_run)


@get("/v1/services", guards=[user_guard], opt={"scope": READ}, summary="Services of the org, by name")
async def list_services(request: Http, cursor: Cursor = None, limit: Limit = 100) -> ServicePage:
    return await kernel_of(request).bus_pages.services(registrar_of(request), cursor, limit)


@get("/v1/services/{service:str}", guards=[user_guard], opt={"scope": READ}, summary="A service")
async def get_service(request: Http, service: FromPath[str]) -> ServiceView:
    return await kernel_of(request).bus_pages.service(service, registrar_of(request))


@delete(
    "/v1/services/{service:str}",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Remove a service that no route, ACL or limit names, with its keys",
)
async def drop_service(request: Http, service: FromPath[str], dry_run: DryRun = False) -> RegistryChange:
    which = ServiceRequest(name=service)
    return await kernel_of(request).bus_registry.drop(SERVICE, which, registrar_of(request), dry_run=dry_run)


# Routes


@post(
    "/v1/routes",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Say where a command of a target goes, or change it",
)
async def put_route(request: Http, data: JSONBody[RouteRequest], dry_run: DryRun = False) -> RegistryChange:
    return await kernel_of(request).bus_registry.put(ROUTE, data, registrar_of(request), dry_run=dry_run)


@post(
    "/v1/routes/test",
    guards=[user_guard],
    opt={"scope": READ},
    status_code=200,
    summary="What would become of a command: every check, and what to write where one fails",
)
async def try_route(request: Http, data: JSONBody[RouteTrialRequest]) -> RouteTrial:
    return await kernel_of(request).bus_pages.trial(data, registrar_of(request))


@get("/v1/routes", guards=[user_guard], opt={"scope": READ}, summary="Routes of the org, by target and name")
async def list_routes(request: Http, target: Target = None, cursor: Cursor = None, limit: Limit = 100) -> RoutePage:
    return await kernel_of(request).bus_pages.routes(registrar_of(request), target, cursor, limit)


@get("/v1/routes/{target:str}/{name:str}", guards=[user_guard], opt={"scope": READ}, summary="A route")
async def get_route(request: Http, target: FromPath[str], name: FromPath[str]) -> RouteView:
    return await kernel_of(request).bus_pages.route(target, name, registrar_of(request))


@delete(
    "/v1/routes/{target:str}/{name:str}",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Remove a route; what is in its queue stays there",
)
async def drop_route(
    request: Http, target: FromPath[str], name: FromPath[str], dry_run: DryRun = False
) -> RegistryChange:
    which = RouteRequest(target=target, name=name)
    return await kernel_of(request).bus_registry.drop(ROUTE, which, registrar_of(request), dry_run=dry_run)


# ACLs


@post(
    "/v1/acls",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Let a service send a command to a target, or change how",
)
async def put_acl(request: Http, data: JSONBody[AclRequest], dry_run: DryRun = False) -> RegistryChange:
    return await kernel_of(request).bus_registry.put(ACL, data, registrar_of(request), dry_run=dry_run)


@get("/v1/acls", guards=[user_guard], opt={"scope": READ}, summary="Who may send what, by target and name")
async def list_acls(request: Http, target: Target = None, cursor: Cursor = None, limit: Limit = 100) -> AclPage:
    return await kernel_of(request).bus_pages.acls(registrar_of(request), target, cursor, limit)


@delete(
    "/v1/acls/{target:str}/{name:str}/{source:str}",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Let a service send a command no longer",
    description="Dispatchers know it within the lifetimes of its sensitivity.",
)
async def drop_acl(
    request: Http, target: FromPath[str], name: FromPath[str], source: FromPath[str], dry_run: DryRun = False
) -> RegistryChange:
    which = AclRequest(source=source, target=target, name=name)
    return await kernel_of(request).bus_registry.drop(ACL, which, registrar_of(request), dry_run=dry_run)


# Limits


@post(
    "/v1/limits",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Say how many commands may come, or change it",
)
async def put_limit(request: Http, data: JSONBody[LimitRequest], dry_run: DryRun = False) -> RegistryChange:
    return await kernel_of(request).bus_registry.put(LIMIT, data, registrar_of(request), dry_run=dry_run)


@get(
    "/v1/limits",
    guards=[user_guard],
    opt={"scope": READ},
    summary="Limits of the org, by target and name",
)
async def list_limits(request: Http, target: Target = None, cursor: Cursor = None, limit: Limit = 100) -> LimitPage:
    return await kernel_of(request).bus_pages.limits(registrar_of(request), target, cursor, limit)


@delete(
    "/v1/limits/{target:str}/{name:str}",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Remove a limit, or with `source` the quota of one source",
)
async def drop_limit(
    request: Http,
    target: FromPath[str],
    name: FromPath[str],
    source: FromQuery[str | None] = None,
    dry_run: DryRun = False,
) -> RegistryChange:
    which = LimitRequest(target=target, name=name, source=source, rate=1)
    return await kernel_of(request).bus_registry.drop(LIMIT, which, registrar_of(request), dry_run=dry_run)


@delete(
    "/v1/limits",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Remove the limit that is on a source alone",
)
async def drop_source_limit(request: Http, source: FromQuery[str], dry_run: DryRun = False) -> RegistryChange:
    which = LimitRequest(source=source, rate=1)
    return await kernel_of(request).bus_registry.drop(LIMIT, which, registrar_of(request), dry_run=dry_run)


# Keys


@post(
    "/v1/service-keys",
    guards=[user_guard],
    opt={"scope": ADMIN},
    summary="Make the next version of a service's key, which is current at once",
    description="The version before it stays good for a while. The secret is not in the answer: the service reads it "
    "from `/v1/tenant-config`.",
)
async def rotate_service_key(request: Http, data: JSONBody[ServiceKeyRequest]) -> ServiceKeyView:
    return await kernel_of(request).service_keys.rotate(
        data.service, registrar_of(request), overlap_seconds=data.overlap_seconds
    )


@get("/v1/service-keys", guards=[user_guard], opt={"scope": READ}, summary="Versions of services' keys")
async def list_service_keys(
    request: Http, service: FromQuery[str | None] = None, cursor: Cursor = None, limit: Limit = 100
) -> ServiceKeyPage:
    return await kernel_of(request).service_keys.page(registrar_of(request), service, cursor, limit)


@delete(
    "/v1/service-keys/{service:str}/{version_id:str}",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Revoke a version at once; where it was the current one, the next takes its place",
)
async def revoke_service_key(request: Http, service: FromPath[str], version_id: FromPath[str]) -> ServiceKeyView:
    return await kernel_of(request).service_keys.revoke(service, version_id, registrar_of(request))


@get(
    "/v1/tenant-config",
    guards=[user_guard],
    opt={"scope": SEND},
    summary="What a producer signs with: the versions of its own key, and when to ask again",
)
async def tenant_config(request: Http) -> TenantConfig:
    principal = principal_of(request)
    return await kernel_of(request).service_keys.tenant_config(principal.org_id, principal.org, principal.service)


# The changelog


@get("/v1/changes", guards=[user_guard], opt={"scope": READ}, summary="Changes of the registry, newest first")
async def list_changes(
    request: Http, kind: FromQuery[RegistryKind | None] = None, cursor: Cursor = None, limit: Limit = 100
) -> ChangePage:
    return await kernel_of(request).bus_registry.changes(registrar_of(request), kind, cursor, limit)


@get("/v1/changes/{change_id:int}", guards=[user_guard], opt={"scope": READ}, summary="A change: before and after")
async def get_change(request: Http, change_id: FromPath[int]) -> RegistryChange:
    return await kernel_of(request).bus_registry.change(change_id, registrar_of(request))


@post(
    "/v1/changes/{change_id:int}/revert",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Take a change back, if it is the newest of its subject",
)
async def revert_change(request: Http, change_id: FromPath[int], dry_run: DryRun = False) -> RegistryChange:
    registry, by = kernel_of(request).bus_registry, registrar_of(request)
    change = await registry.change(change_id, by)
    if change.kind is not RegistryKind.ROUTES and change.kind is not RegistryKind.LIMITS:
        principal_of(request).require(ADMIN)
    return await registry.revert(change_id, by, dry_run=dry_run)


HANDLERS = [
    put_service,
    list_services,
    get_service,
    drop_service,
    put_route,
    try_route,
    list_routes,
    get_route,
    drop_route,
    put_acl,
    list_acls,
    drop_acl,
    put_limit,
    list_limits,
    drop_limit,
    drop_source_limit,
    rotate_service_key,
    list_service_keys,
    revoke_service_key,
    tenant_config,
    list_changes,
    get_change,
    revert_change,
]
