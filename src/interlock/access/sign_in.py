"""Sign-in with the identity provider: OpenID Connect, authorization code with PKCE.

The browser keeps the state of a sign-in in a cookie of its own until the provider sends it back, so that nobody can
finish a sign-in in another person's browser, and unfinished ones cost the database nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Struct

from interlock.access.jwks import Documents
from interlock.access.oidc import Issuer
from interlock.errors import Unauthenticated, Unavailable

CALLBACK: Final = "/v1/sign-in/callback"
LOGIN_COOKIE: Final = "interlock_login"
LOGIN_SECONDS: Final = 600
HOME: Final = "/ui/"
_MAX_RETURN: Final = 2_000


class _Discovery(Struct, frozen=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str


class _Tokens(Struct, frozen=True):
    id_token: str


class Login(Struct, frozen=True, array_like=True):
    """A sign-in under way, as its cookie stores it."""

    state: str
    nonce: str
    verifier: str
    return_to: str

    def cookie(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).rstrip(b"=").decode()

    @staticmethod
    def of(cookie: str | None) -> Login | None:
        if cookie is None:
            return None
        try:
            raw = base64.urlsafe_b64decode(cookie.encode("ascii") + b"=" * (-len(cookie) % 4))
            return msgspec.json.decode(raw, type=Login)
        except (ValueError, msgspec.MsgspecError):
            return None


@dataclass(frozen=True)
class IdentityProviderSignIn:
    issuer: Issuer
    http: Documents
    client_id: str
    client_secret: str | None
    redirect_uri: str

    async def begin(self, return_to: str) -> tuple[str, Login]:
        """Returns the URL at the provider to navigate to, and the state for the cookie."""
        found = await self._endpoints()
        login = Login(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
            return_to=local_path(return_to),
        )
        challenge = hashlib.sha256(login.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": "openid",
            "state": login.state,
            "nonce": login.nonce,
            "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        separator = "&" if "?" in found.authorization_endpoint else "?"
        return f"{found.authorization_endpoint}{separator}{urlencode(query)}", login

    async def finish(self, login: Login | None, state: str | None, code: str | None) -> str:
        """Exchanges the code for an ID token and returns its subject."""
        if login is None or state is None or not hmac.compare_digest(login.state.encode(), state.encode()):
            raise Unauthenticated("This sign-in has expired; start it again.", code="login_expired")
        if not code:
            raise Unauthenticated("The identity provider did not sign you in.", code="provider_refused")
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "client_id": self.client_id,
            "code_verifier": login.verifier,
        }
        document = await self.http.post_form((await self._endpoints()).token_endpoint, form, self._credentials())
        try:
            tokens = msgspec.json.decode(document, type=_Tokens)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Unavailable("The token reply of the issuer is invalid.", code="no_document") from None
        return await self.issuer.subject_of_sign_in(tokens.id_token, login.nonce)

    def _credentials(self) -> dict[str, str]:
        if self.client_secret is None:
            return {}
        pair = f"{quote(self.client_id, safe='')}:{quote(self.client_secret, safe='')}"
        return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}

    async def _endpoints(self) -> _Discovery:
        name = self.issuer.name
        document = await self.http.fetch(f"{name.rstrip('/')}/.well-known/openid-configuration")
        try:
            found = msgspec.json.decode(document, type=_Discovery)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise Unavailable("The discovery document of the issuer is invalid.", code="no_document") from None
        schemes = ("https://",) if name.startswith("https://") else ("http://", "https://")
        urls = (found.authorization_endpoint, found.token_endpoint)
        if found.issuer != name or not all(url.startswith(schemes) for url in urls):
            raise Unavailable("The discovery document is of another issuer, or does not use TLS.", code="no_document")
        return found


def local_path(path: str) -> str:
    """Returns a path of the dashboard; anything else becomes its start page, so that no link leads elsewhere."""
    plain = path.startswith(HOME) and len(path) <= _MAX_RETURN and path.isascii() and path.isprintable()
    return path if plain and "\\" not in path and "/.." not in path else HOME
