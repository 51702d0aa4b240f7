"""The gateway on another server than its own: python -m tests.other_server h11 asyncio serve ...

Its own is a subclass of uvicorn's httptools protocol, on uvloop; elsewhere the relay has plain ASGI
and nothing more. The log says what it ran on, so that a test can see that this was not in vain.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import uvloop

from gateway import cli, service

LOOPS = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
_made = service.http_server
log = logging.getLogger(__name__)


def main(protocol: str, loop: str) -> None:
    """``protocol``: a name of uvicorn's, or "own" for the gateway's."""

    def http_server(*args: Any) -> service.HttpServer:
        server = _made(*args)
        if protocol != "own":
            server.config.http = protocol
        server.config.load()
        kind = server.config.http_protocol_class
        running = type(asyncio.get_running_loop())
        log.info("on %s and %s", f"{kind.__module__}.{kind.__name__}", running.__module__)
        return server

    service.http_server = http_server
    uvloop.new_event_loop = LOOPS[loop]
    cli.main()


if __name__ == "__main__":
    wanted = sys.argv[1:3]
    del sys.argv[1:3]
    main(*wanted)
