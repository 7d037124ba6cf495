"""FastAPI, with a direct way to the routes that answer.

FastAPI describes the routes, and serves all others. On its own way to a route it enters a dozen
layers. Three of them wrap every piece of a stream as well. For a route that reads its body itself
(``BodyRoute``) they do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.serve.http.bodies import BodyRoute


class Application(FastAPI):
    """An application whose outermost middleware answers unexpected errors and measures requests:
    it has none of FastAPI's layers for that."""

    def build_middleware_stack(self) -> ASGIApp:
        handlers = self.exception_handlers
        stack: ASGIApp = AsyncExitStackMiddleware(self.router)
        stack = ExceptionMiddleware(stack, handlers=handlers, debug=self.debug)
        stack = _DirectRoutes(stack, handlers, self.state.endpoints)
        for middleware in reversed(self.user_middleware):
            stack = middleware.cls(stack, *middleware.args, **middleware.kwargs)
        return stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        way = Starlette if scope["type"] == "http" else FastAPI
        await way.__call__(self, scope, receive, send)


class _DirectRoutes:
    """Calls the handlers of routes with a body and a fixed path."""

    def __init__(
        self, rest: ASGIApp, on_error: Mapping[Any, Any], routes: Iterable[APIRoute]
    ) -> None:
        """``on_error``: the answers to exceptions, by their type."""
        self._rest = rest
        self._on_error = on_error
        self._routes = {
            (method, route.path): (route, route.handler)
            for route in routes
            if isinstance(route, BodyRoute) and route.has_body and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http":
            found = self._routes.get((scope["method"], scope["path"]))
        if found is None:
            await self._rest(scope, receive, send)
            return
        scope["route"], handler = found
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except Exception as error:
            handlers = (self._on_error.get(kind) for kind in type(error).__mro__)
            answer_to = next(filter(None, handlers), None)
            if answer_to is None:
                raise
            response = await answer_to(request, error)
        await response(scope, receive, send)
