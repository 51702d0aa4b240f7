"""The FastAPI application: paths, and errors in the shape of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway import __version__
from gateway.api import errors, openapi
from gateway.api.admin import add_admin
from gateway.api.body import read_body
from gateway.api.deps import Deps
from gateway.api.dialect import DIALECTS, of_path
from gateway.api.explain import explained
from gateway.api.relay import Relay

Models = Callable[[], list[dict[str, Any]]]

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_READY_RETRY = {"retry-after": "5"}


class Front:
    """The ASGI application: prompts go straight to their relay, the rest through FastAPI.

    FastAPI's own way to an endpoint costs more CPU than all that the relay does before it sends
    the request on.
    """

    def __init__(self, app: FastAPI, relays: dict[str, Relay]) -> None:
        self._app = app
        self._relays = relays

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        relay = self._relays.get(scope.get("path", ""))
        if relay is not None and scope["type"] == "http" and scope["method"] == "POST":
            await relay(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def build_app(deps: Deps, models: Models) -> Front:
    """``models``: the models of the ready workers, as ``GET /v1/models`` lists them."""
    app = FastAPIOffline(
        title="vLLM affinity gateway",
        version=__version__,
        description=openapi.DESCRIPTION,
        redoc_url=None,
        redirect_slashes=False,
    )
    relays = {path: Relay(deps, dialect) for path, dialect in DIALECTS.items()}
    for path, relay in relays.items():
        app.router.routes.append(Route(path, relay, methods=["POST"]))
    _add_models(app, deps, models)
    _add_operations(app, deps)
    add_admin(app, deps.reset_caches)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    made = app.openapi
    app.openapi = lambda: openapi.describe(made())  # type: ignore[method-assign]
    return Front(app, relays)


def _add_models(app: FastAPI, deps: Deps, models: Models) -> None:
    @app.get("/v1/models", tags=["OpenAI"])
    async def list_models() -> Response:
        """Models of all ready workers, as the workers describe them; of several descriptions of
        one model the one with the smallest `max_model_len`."""
        if not any(worker.available for worker in deps.router.workers.values()):
            raise HTTPException(503, "no worker is ready", _NOT_READY_RETRY)
        return _json({"object": "list", "data": models()})

    @app.get("/v1/models/{model:path}", tags=["OpenAI"])
    async def get_model(model: str) -> Response:
        """One model; ids may hold slashes."""
        for found in models():
            if found.get("id") == model:
                return _json(found)
        names = ", ".join(str(m.get("id")) for m in models()) or "none"
        raise HTTPException(404, f"there is no model {model!r}; there is: {names}")


def _add_operations(app: FastAPI, deps: Deps) -> None:
    @app.get("/health", tags=["operations"])
    async def health() -> Response:
        """200 while the gateway is alive, whatever its workers do."""
        return _json({"status": "ok"})

    @app.get("/ready", tags=["operations"])
    async def ready() -> Response:
        """200 when at least one worker takes requests; else 503 with each worker's reason."""
        workers = deps.router.workers.values()
        states = {w.id: "ready" if w.available else w.reason for w in workers}
        if any(w.available for w in workers):
            return _json({"status": "ready", "workers": states})
        return _json({"status": "not ready", "workers": states}, 503, _NOT_READY_RETRY)

    @app.post("/route/explain", tags=["operations"], openapi_extra=openapi.ANY_PROMPT)
    async def route_explain(request: Request) -> Response:
        """How this body of a completion would be placed now: the worker, why, and each worker's
        cost in seconds. Nothing is sent."""
        try:
            body = await read_body(request.scope, request.receive, deps.max_body_bytes)
            return _json(await explained(deps, request.headers.raw, body))
        except errors.ApiError as error:
            headers = {name.decode(): value.decode() for name, value in error.headers}
            return Response(errors.openai_body(error), error.status, headers, "application/json")

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(deps.metrics.expose(), media_type=_METRICS_TYPE)


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if error.status_code == 404 and text == "Not Found":
        text = f"there is no {request.url.path} here"
    if error.status_code == 405:
        text = f"{request.url.path} does not take {request.method}"
    made = errors.for_status(error.status_code, text)
    body = of_path(request.url.path).error_body(made)
    return Response(body, made.status, dict(error.headers or {}), "application/json")


async def _internal_error(request: Request, error: Exception) -> Response:
    made = errors.for_status(500, "the gateway failed; its log says why")
    return Response(errors.openai_body(made), 500, media_type="application/json")
