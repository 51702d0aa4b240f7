"""Log lines on stderr."""

from __future__ import annotations

import logging
import sys

_EXPECTED = "ASGI callable returned without completing response."
"""uvicorn's word for an answer that we break off because the worker's was broken off."""


def setup_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def _is_news(record: logging.LogRecord) -> bool:
    return record.getMessage() != _EXPECTED
