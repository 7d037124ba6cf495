"""Keys, tenants, and the salts that keep what they have read apart."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import blake2b

from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.serve.errors import ApiError
from kvboost.serve.settings import ApiKey, ServerSettings

PRIVATE = ("/v1/", "/kvboost/")
ADMIN = "/kvboost/"


@dataclass(frozen=True)
class Tenant:
    """Who asks. Without keys everybody is the same one."""

    name: str = "anyone"
    root: str = ""
    """What all salts of this tenant are derived from; empty where the cache is shared."""
    is_admin: bool = True

    def salt(self, cache_salt: str = "") -> str:
        """Under what the tenant's requests with ``cache_salt`` keep what they read. The root is
        of fixed length, so no two pairs give the same."""
        return f"{self.root}{cache_salt}"


class Keys:
    """The keys there are."""

    def __init__(self, settings: ServerSettings) -> None:
        marked = any(key.is_admin for key in settings.keys)
        self._tenants = [
            (
                key.secret.encode(),
                Tenant(
                    key.name,
                    "" if settings.shared_cache else tenant_root(key),
                    key.is_admin or not marked,
                ),
            )
            for key in settings.keys
        ]

    def tenant(self, authorization: str | None) -> Tenant:
        """Who an ``Authorization`` header belongs to; raises ApiError 401 if to nobody."""
        if not self._tenants:
            return Tenant()
        scheme, _, given = (authorization or "").strip().partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise _refused("this server needs an API key: send it as 'Authorization: Bearer KEY'")
        found = None
        for secret, tenant in self._tenants:  # all of them, so that time tells nothing
            if hmac.compare_digest(secret, given.encode("utf-8", "replace")):
                found = tenant
        if found is None:
            raise _refused("the API key is not known here")
        return found

    def named(self, name: str) -> Tenant:
        """The tenant an administrator means; raises ApiError 404 if there is none."""
        for _, tenant in self._tenants:
            if tenant.name == name:
                return tenant
        raise ApiError(404, f"there is no tenant {name!r}", code="tenant_not_found", param="tenant")


class AuthMiddleware:
    """Lets requests through that have a key where one is needed, before any of their body is
    read; they then know their tenant (``request.state.tenant``)."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PRIVATE):
            headers = dict(scope["headers"])
            try:
                given = headers.get(b"authorization")
                tenant = self._keys.tenant(None if given is None else given.decode("latin-1"))
                if scope["path"].startswith(ADMIN) and not tenant.is_admin:
                    raise ApiError(
                        403,
                        f"the key of {tenant.name!r} is not an administrator's",
                        kind="permission_error",
                        code="not_admin",
                    )
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def tenant_root(key: ApiKey) -> str:
    """Nobody can tell the key from it, and no other key gives the same."""
    return blake2b(key.secret.encode(), digest_size=16, person=b"kvboost-tenant").hexdigest()


def _refused(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
