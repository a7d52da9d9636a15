"""Builds the access capability: who may call, and what each credential opens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import structlog

from interlock.access.jwks import Documents, PublishedKeys
from interlock.access.jwt import SharedSecret
from interlock.access.keyring import Keyring
from interlock.access.object_tokens import ObjectTokens
from interlock.access.oidc import Issuer
from interlock.access.principals import Principals
from interlock.access.secrets import Seal, Secrets
from interlock.access.sessions import Sessions
from interlock.access.sign_in import CALLBACK, IdentityProviderSignIn
from interlock.access.signed_urls import RESULTS, SignedUrls
from interlock.access.tokens import CapabilityTokens, CapabilityVerifier
from interlock.clock import Clock
from interlock.http.request_limits import Lockout, RequestLimit
from interlock.http.requests import Connection
from interlock.settings import Settings
from interlock.stores.objects import Objects, open_objects
from interlock.stores.postgres import Database
from interlock.stores.signers import Signers
from interlock.stores.valkey import Coordination

log = structlog.get_logger()


@dataclass(frozen=True)
class Access:
    principals: Principals
    sessions: Sessions
    lockout: Lockout
    request_limit: RequestLimit
    keyring: Keyring
    tokens: CapabilityTokens
    capabilities: CapabilityVerifier
    """Admits attempts: the tokens themselves, or a verifier that holds public keys only."""
    object_tokens: ObjectTokens
    signed_urls: SignedUrls
    result_urls: SignedUrls
    secrets: Secrets
    objects: Objects


def build_access(settings: Settings, database: Database, coordination: Coordination | None) -> Access:
    clock = database.clock
    keyring = open_keyring(settings, database)
    tokens = CapabilityTokens(
        database,
        keyring,
        clock,
        issuer=settings.token_issuer,
        ttl_seconds=settings.token_ttl_seconds,
        secret=_development_secret(settings),
    )
    signed_urls = SignedUrls(keyring, clock, base_url=settings.objects_base_url)
    objects = open_objects(
        settings.objects_root,
        endpoint=settings.objects_endpoint,
        region=settings.objects_region,
        sign_url=signed_urls.sign,
    )
    principals = Principals(database, clock, issuer=identity_provider(settings, clock))
    return Access(
        principals=principals,
        sessions=Sessions(database, settings, principals.members, provider_sign_in(settings, clock)),
        lockout=Lockout(settings.auth_failures_per_second),
        request_limit=RequestLimit(coordination, settings.requests_per_second),
        keyring=keyring,
        tokens=tokens,
        capabilities=tokens,
        object_tokens=ObjectTokens(database, keyring, clock, issuer=settings.token_issuer, root=settings.objects_root),
        signed_urls=signed_urls,
        result_urls=SignedUrls(keyring, clock, base_url=settings.objects_base_url, path=RESULTS),
        secrets=Secrets(database, Seal(settings.signing_keys_dir)),
        objects=objects,
    )


def verifying_with_published_keys(access: Access, settings: Settings, database: Database, clock: Clock) -> Access:
    """Verifies capability tokens with the keys that the dispatcher publishes, where `internal_url` names it."""
    if settings.internal_url is None:
        return access
    keys = PublishedKeys(settings.internal_url, Documents(settings.tls_ca), clock)
    verifier = CapabilityVerifier(
        database, keys, clock, issuer=settings.token_issuer, secret=_development_secret(settings)
    )
    return replace(access, capabilities=verifier)


def open_keyring(settings: Settings, database: Database) -> Keyring:
    signers = Signers(
        settings.signing_keys_dir, kind=settings.signing, kms_key=settings.kms_key_id, endpoint=settings.kms_endpoint
    )
    return Keyring(database, signers, verify_seconds=2 * settings.token_ttl_seconds)


def identity_provider(settings: Settings, clock: Clock) -> Issuer | None:
    if settings.oidc_issuer is None or settings.oidc_audience is None:
        return None
    return Issuer(settings.oidc_issuer, settings.oidc_audience, Documents(), clock, jwks_url=settings.oidc_jwks_url)


def provider_sign_in(settings: Settings, clock: Clock) -> IdentityProviderSignIn | None:
    if settings.oidc_issuer is None or settings.oidc_client_id is None:
        return None
    # An ID token is for the client, an access token for the API: each has its own audience.
    issuer = Issuer(settings.oidc_issuer, settings.oidc_client_id, Documents(), clock, jwks_url=settings.oidc_jwks_url)
    secret = settings.oidc_client_secret
    return IdentityProviderSignIn(
        issuer,
        Documents(),
        client_id=settings.oidc_client_id,
        client_secret=secret.get_secret_value() if secret else None,
        redirect_uri=f"{settings.objects_base_url}{CALLBACK}",
    )


def _development_secret(settings: Settings) -> SharedSecret | None:
    if not settings.development_tokens:
        return None
    log.warning(
        "development_tokens",
        meaning="capability tokens are HS256: any process that can verify them can also forge them",
    )
    return SharedSecret(settings.signing_keys_dir)


def access_of(connection: Connection) -> Access:
    access: Access = connection.app.state.access
    return access
