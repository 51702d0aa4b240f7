"""What contract cases expect of answers, of workers and of the counts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.fake_worker import FakeWorker, Received
from tests.gateway_process import GatewayProcess
from tests.raw_http import Answer
from tests.waiting import until

OUTCOMES = ("ok", "client_gone", "refused", "upstream_error", "upstream_truncated", "timeout")


class Counted:
    """What `gateway_requests_total` gained since this was made, by outcome."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._before = self._read()

    def _read(self) -> Counter[str]:
        read: Counter[str] = Counter()
        for (name, labels), value in self._gateway.samples().items():
            if name == "gateway_requests_total":
                read[dict(labels)["outcome"]] += int(value)
        assert read.keys() <= set(OUTCOMES)
        return read

    def since(self) -> dict[str, int]:
        return dict(self._read() - self._before)

    def is_(self, **expected: int) -> None:
        """Waits, as a request is counted a moment after its last byte is out."""
        until(f"{expected} counted, not {self.since()}", lambda: self.since() == expected, 3)


def only(workers: list[FakeWorker]) -> Received:
    """The one request that reached a worker: nothing was replayed."""
    (request,) = [r for worker in workers for r in worker.inference]
    return request


def wait_only(workers: list[FakeWorker]) -> tuple[FakeWorker, Received]:
    found = until("a request at a worker", lambda: [(w, r) for w in workers for r in w.inference])
    assert len(found) == 1
    return found[0]


def assert_in_band_error(answer: Answer) -> dict[str, Any]:
    """The last event is one error in OpenAI's shape, and the end is abnormal."""
    assert answer.end == "cut"
    *events, last = answer.events()
    assert last.startswith(b"data: {") and last.endswith(b"\n\n")
    error = json.loads(last[6:])["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert b"[DONE]" not in answer.body
    assert not any(b'"error":' in each for each in events)
    assert not any(b'"finish_reason":"' in each for each in events)
    return dict(error)


def assert_openai_error(answer: Answer, status: int) -> dict[str, Any]:
    """A whole answer of this status in OpenAI's shape; its `error`."""
    assert (answer.status, answer.end) == (status, "complete"), answer.body
    assert (answer.header("content-type") or "").startswith("application/json")
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert isinstance(error["message"], str) and error["message"]
    assert "Traceback" not in error["message"]
    return dict(error)
