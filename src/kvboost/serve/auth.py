"""Keys, tenants, and the salts that separate their cached text."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown
from kvboost.serve.settings import TENANT_PATHS, ApiKey, ServerSettings


class Place(NamedTuple):
    """Where a tenant keeps what it sends."""

    owner: str
    """The tenant's id: documents, sessions and responses belong to it alone."""
    salt: str
    """The engine's salt: requests under the same one share cached KV."""


@dataclass(frozen=True)
class Tenant:
    """The user that a request belongs to. Without keys there is one for all requests."""

    name: str = "anyone"
    owner: str = ""
    """A hash of its key: another key of the same name is another owner. Empty without keys."""
    root: str = ""
    """The beginning of all salts of this tenant; empty if the cache is shared."""
    is_admin: bool = True
    counts_as: str = ""
    """The tenant's name for the scheduler. Empty without other tenants."""

    def salt(self, cache_salt: str = "") -> str:
        """The engine's salt for this tenant's requests with ``cache_salt``. All roots have the same
        length, so no two pairs of root and salt give the same result."""
        return f"{self.root}{cache_salt}"

    def place(self, cache_salt: str = "") -> Place:
        return Place(self.owner, self.salt(cache_salt))


class Keys:
    """The keys of the server and their tenants."""

    def __init__(self, settings: ServerSettings) -> None:
        self._tenants: list[tuple[bytes, Tenant]] = []
        self.load(settings)

    def load(self, settings: ServerSettings) -> None:
        """Replaces all keys by those of ``settings``."""
        marked = any(key.is_admin for key in settings.keys)
        tenants = []
        for key in settings.keys:
            root = "" if settings.shared_cache else key_hash(key)
            counts_as = key.name if len(settings.keys) > 1 else ""
            is_admin = key.is_admin or not marked
            tenant = Tenant(key.name, key_hash(key), root, is_admin, counts_as)
            tenants.append((key.secret.encode(), tenant))
        self._tenants = tenants

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant of an ``Authorization`` header. Raises ApiError 401 if there is none."""
        if not self._tenants:
            return Tenant()
        scheme, _, given = (authorization or "").strip().partition(" ")
        given = given.strip()
        if scheme.lower() != "bearer" or not given:
            raise _refused(
                "this server needs an API key: send it as 'Authorization: Bearer KEY' or "
                "as 'x-api-key: KEY'"
            )
        found = None
        for secret, tenant in self._tenants:  # all of them, so that the time reveals nothing
            if hmac.compare_digest(secret, given.encode("utf-8", "replace")):
                found = tenant
        if found is None:
            raise _refused("the API key is not valid")
        return found

    def tenants(self) -> list[Tenant]:
        """All of them; without keys, the one of all requests."""
        return [tenant for _, tenant in self._tenants] or [Tenant()]

    def named(self, name: str) -> Tenant:
        """The tenant of that name. Raises ApiError 404 if there is none."""
        for _, tenant in self._tenants:
            if tenant.name == name:
                return tenant
        raise ApiError(404, f"there is no tenant {shown(name)}", "tenant_not_found", "tenant")


class AuthMiddleware:
    """Refuses requests without the key that they need, before any of their body is read. Sets the
    tenant of the others (``request.state.tenant``)."""

    def __init__(self, app: ASGIApp, keys: Keys, settings: ServerSettings) -> None:
        self._app = app
        self._keys = keys
        self._private = settings.private_paths
        self._admin = settings.admin_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._private):
            headers = dict(scope["headers"])
            try:
                tenant = self._keys.tenant(_given_key(headers))
                path = scope["path"]
                needs_admin = path.startswith(self._admin) and not path.startswith(TENANT_PATHS)
                if needs_admin and not tenant.is_admin:
                    said = f"the key of {tenant.name!r} is not an administrator's"
                    raise ApiError(403, said, "not_admin")
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _given_key(headers: Mapping[bytes, bytes]) -> str | None:
    """The ``Authorization`` header, or Anthropic's ``x-api-key`` as one."""
    given = headers.get(b"authorization")
    if given is None and (key := headers.get(b"x-api-key")) is not None:
        given = b"Bearer " + key
    return None if given is None else given.decode("latin-1")


def key_hash(key: ApiKey) -> str:
    """A hash of the key. It does not reveal the key, and no other key has the same."""
    return blake2b(key.secret.encode(), digest_size=16, person=b"kvboost-tenant").hexdigest()


def _refused(message: str) -> ApiError:
    return ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
