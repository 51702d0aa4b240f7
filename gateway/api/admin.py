"""What operators may do to the workers through the gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.core.reservation import WorkerId

ResetCaches = Callable[[], Awaitable[dict[WorkerId, str]]]
"""Empties the prefix caches; of each worker ``reset``, or why not."""

_NOT_ENABLED = (
    "admin endpoints are off: start the gateway with --admin-endpoints (and servers of your own"
    " with VLLM_SERVER_DEV_MODE=1)"
)


def add_admin(app: FastAPI, reset_caches: ResetCaches | None) -> None:
    """None where these endpoints were not asked for: they answer 501."""

    @app.post("/admin/reset_prefix_cache", tags=["admin"])
    async def reset_prefix_cache() -> JSONResponse:
        """Empty the prefix cache of every worker. 200 if all were, else 502 with what each said."""
        if reset_caches is None:
            raise HTTPException(501, _NOT_ENABLED)
        told = await reset_caches()
        whole = all(said == "reset" for said in told.values())
        return JSONResponse({"workers": told}, 200 if whole else 502)
