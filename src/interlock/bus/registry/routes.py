"""The registry of the command bus over HTTP: services, routes, ACLs, limits, keys, and their changelog."""

from __future__ import annotations

from typing import Annotated

from litestar import delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter

from interlock.access.guards import principal_of, user_guard
from interlock.access.principals import SEND
from interlock.bus.build import bus_of
from interlock.bus.registry.entries import ACL, LIMIT, ROUTE, SERVICE, Registrar
from interlock.http.requests import Cursor, Http, Limit
from interlock.wire.bus_registry import (
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
"""Only admins change ACLs and keys."""

DryRun = Annotated[bool, QueryParameter(name="dry_run", description="validate and return the change without making it")]
Target = Annotated[
    str | None, QueryParameter(name="target", required=False, max_length=64, description="only entries of this target")
]


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
    description="A new service gets its first key. Its producers read the key from `/v1/tenant-config`.",
)
async def put_service(request: Http, data: JSONBody[ServiceRequest], dry_run: DryRun = False) -> RegistryChange:
    return await bus_of(request).registry.put(SERVICE, data, registrar_of(request), dry_run=dry_run)


@get("/v1/services", guards=[user_guard], opt={"scope": READ}, summary="Services of the org, by name")
async def list_services(request: Http, cursor: Cursor = None, limit: Limit = 100) -> ServicePage:
    return await bus_of(request).pages.services(registrar_of(request), cursor, limit)


@get("/v1/services/{service:str}", guards=[user_guard], opt={"scope": READ}, summary="A service")
async def get_service(request: Http, service: FromPath[str]) -> ServiceView:
    return await bus_of(request).pages.service(service, registrar_of(request))


@delete(
    "/v1/services/{service:str}",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Remove a service and its keys; no route, ACL or limit may refer to it",
)
async def drop_service(request: Http, service: FromPath[str], dry_run: DryRun = False) -> RegistryChange:
    which = ServiceRequest(name=service)
    return await bus_of(request).registry.drop(SERVICE, which, registrar_of(request), dry_run=dry_run)


# Routes


@post(
    "/v1/routes",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Create or replace the route of a command",
)
async def put_route(request: Http, data: JSONBody[RouteRequest], dry_run: DryRun = False) -> RegistryChange:
    return await bus_of(request).registry.put(ROUTE, data, registrar_of(request), dry_run=dry_run)


@post(
    "/v1/routes/test",
    guards=[user_guard],
    opt={"scope": READ},
    status_code=200,
    summary="Test a command: the result of every check, and how to fix a failed one",
)
async def try_route(request: Http, data: JSONBody[RouteTrialRequest]) -> RouteTrial:
    return await bus_of(request).pages.trial(data, registrar_of(request))


@get("/v1/routes", guards=[user_guard], opt={"scope": READ}, summary="Routes of the org, by target and name")
async def list_routes(request: Http, target: Target = None, cursor: Cursor = None, limit: Limit = 100) -> RoutePage:
    return await bus_of(request).pages.routes(registrar_of(request), target, cursor, limit)


@get("/v1/routes/{target:str}/{name:str}", guards=[user_guard], opt={"scope": READ}, summary="A route")
async def get_route(request: Http, target: FromPath[str], name: FromPath[str]) -> RouteView:
    return await bus_of(request).pages.route(target, name, registrar_of(request))


@delete(
    "/v1/routes/{target:str}/{name:str}",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Remove a route; messages in its queue stay there",
)
async def drop_route(
    request: Http, target: FromPath[str], name: FromPath[str], dry_run: DryRun = False
) -> RegistryChange:
    which = RouteRequest(target=target, name=name)
    return await bus_of(request).registry.drop(ROUTE, which, registrar_of(request), dry_run=dry_run)


# ACLs


@post(
    "/v1/acls",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Allow a service to send a command to a target, or change the ACL",
)
async def put_acl(request: Http, data: JSONBody[AclRequest], dry_run: DryRun = False) -> RegistryChange:
    return await bus_of(request).registry.put(ACL, data, registrar_of(request), dry_run=dry_run)


@get("/v1/acls", guards=[user_guard], opt={"scope": READ}, summary="ACLs of the org, by target and name")
async def list_acls(request: Http, target: Target = None, cursor: Cursor = None, limit: Limit = 100) -> AclPage:
    return await bus_of(request).pages.acls(registrar_of(request), target, cursor, limit)


@delete(
    "/v1/acls/{target:str}/{name:str}/{source:str}",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Revoke an ACL",
    description="Dispatchers apply it within the time to live of its sensitivity.",
)
async def drop_acl(
    request: Http, target: FromPath[str], name: FromPath[str], source: FromPath[str], dry_run: DryRun = False
) -> RegistryChange:
    which = AclRequest(source=source, target=target, name=name)
    return await bus_of(request).registry.drop(ACL, which, registrar_of(request), dry_run=dry_run)


# Limits


@post(
    "/v1/limits",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Create or replace a limit",
)
async def put_limit(request: Http, data: JSONBody[LimitRequest], dry_run: DryRun = False) -> RegistryChange:
    return await bus_of(request).registry.put(LIMIT, data, registrar_of(request), dry_run=dry_run)


@get(
    "/v1/limits",
    guards=[user_guard],
    opt={"scope": READ},
    summary="Limits of the org, by target and name",
)
async def list_limits(request: Http, target: Target = None, cursor: Cursor = None, limit: Limit = 100) -> LimitPage:
    return await bus_of(request).pages.limits(registrar_of(request), target, cursor, limit)


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
    return await bus_of(request).registry.drop(LIMIT, which, registrar_of(request), dry_run=dry_run)


@delete(
    "/v1/limits",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Remove the limit on a source alone",
)
async def drop_source_limit(request: Http, source: FromQuery[str], dry_run: DryRun = False) -> RegistryChange:
    which = LimitRequest(source=source, rate=1)
    return await bus_of(request).registry.drop(LIMIT, which, registrar_of(request), dry_run=dry_run)


# Keys


@post(
    "/v1/service-keys",
    guards=[user_guard],
    opt={"scope": ADMIN},
    summary="Create the next version of a service's key, which is current at once",
    description="The previous version stays valid for a while. The reply does not contain the secret: the service "
    "reads it from `/v1/tenant-config`.",
)
async def rotate_service_key(request: Http, data: JSONBody[ServiceKeyRequest]) -> ServiceKeyView:
    return await bus_of(request).service_keys.rotate(
        data.service, registrar_of(request), overlap_seconds=data.overlap_seconds
    )


@get("/v1/service-keys", guards=[user_guard], opt={"scope": READ}, summary="Versions of the keys of services")
async def list_service_keys(
    request: Http, service: FromQuery[str | None] = None, cursor: Cursor = None, limit: Limit = 100
) -> ServiceKeyPage:
    return await bus_of(request).service_keys.page(registrar_of(request), service, cursor, limit)


@delete(
    "/v1/service-keys/{service:str}/{version_id:str}",
    guards=[user_guard],
    opt={"scope": ADMIN},
    status_code=200,
    summary="Revoke a version at once; if it was the current one, the next is created",
)
async def revoke_service_key(request: Http, service: FromPath[str], version_id: FromPath[str]) -> ServiceKeyView:
    return await bus_of(request).service_keys.revoke(service, version_id, registrar_of(request))


@get(
    "/v1/tenant-config",
    guards=[user_guard],
    opt={"scope": SEND},
    summary="Configuration of a producer: the versions of its key, and when to poll again",
)
async def tenant_config(request: Http) -> TenantConfig:
    principal = principal_of(request)
    return await bus_of(request).service_keys.tenant_config(principal.org_id, principal.org, principal.service)


# The changelog


@get("/v1/changes", guards=[user_guard], opt={"scope": READ}, summary="Changes of the registry, newest first")
async def list_changes(
    request: Http, kind: FromQuery[RegistryKind | None] = None, cursor: Cursor = None, limit: Limit = 100
) -> ChangePage:
    return await bus_of(request).registry.changes(registrar_of(request), kind, cursor, limit)


@get("/v1/changes/{change_id:int}", guards=[user_guard], opt={"scope": READ}, summary="A change: before and after")
async def get_change(request: Http, change_id: FromPath[int]) -> RegistryChange:
    return await bus_of(request).registry.change(change_id, registrar_of(request))


@post(
    "/v1/changes/{change_id:int}/revert",
    guards=[user_guard],
    opt={"scope": WRITE},
    status_code=200,
    summary="Revert a change, if it is the newest of its subject",
)
async def revert_change(request: Http, change_id: FromPath[int], dry_run: DryRun = False) -> RegistryChange:
    registry, by = bus_of(request).registry, registrar_of(request)
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
