"""A worker that speaks vLLM's HTTP, written on raw bytes: a test controls every one of them."""

from tests.fake_worker.script import Script
from tests.fake_worker.server import Received
from tests.fake_worker.thread import FakeWorker

__all__ = ["FakeWorker", "Received", "Script"]
