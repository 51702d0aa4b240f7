"""A worker that loses its cache without a word, on real vLLM."""

from __future__ import annotations

import httpx
import pytest

from tests.conftest import StartGateway
from tests.documents import questions
from tests.engine.test_affinity import worker_url
from tests.gateway_process import GatewayProcess
from tests.up_process import MODEL_NAME, UpProcess
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)


def test_c18_a_reset_through_us_is_known_at_once(up: UpProcess) -> None:
    prompts = [prompt for _, prompt in questions(12, 2, 1, 200)]
    for prompt in prompts:
        assert ask(up, prompt) == (0, 0)
    reset = httpx.post(f"{up.url}/admin/reset_prefix_cache", timeout=60)
    assert (reset.status_code, reset.json()) == (200, {"workers": {"0": "reset", "1": "reset"}})
    for prompt in prompts:
        assert ask(up, prompt) == (0, 0)
        predicted, delivered = ask(up, prompt)
        assert predicted == delivered > 0


def ask(gateway: GatewayProcess, prompt: str) -> tuple[int, int]:
    """(predicted, delivered) cached tokens."""
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 2,
        "temperature": 0,
    }
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    predicted = int(answer.headers["x-gateway-predicted-cached-tokens"])
    return predicted, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_c18_a_reset_behind_our_back_is_noticed_by_what_is_delivered(
    up: UpProcess, start_gateway: StartGateway
) -> None:
    """The gateway in front is one that follows no events of the engine."""
    url = worker_url(up, "0")
    gateway = start_gateway(workers=[url])
    gateway.wait_up(1)
    prompts = [prompt for _, prompt in questions(11, 6, 1, 200)]
    for prompt in prompts:
        assert ask(gateway, prompt)[0] == 0
    for prompt in prompts:
        predicted, delivered = ask(gateway, prompt)
        assert predicted == delivered > 0
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=30).status_code == 200
    for prompt in prompts[:3]:
        predicted, delivered = ask(gateway, prompt)
        assert predicted > 0 and delivered == 0
    name = "gateway_worker_cache_losses_total"
    until("it is noticed", lambda: gateway.total(name, reason="over_predicted") == 1)
    for prompt in prompts[3:]:
        assert ask(gateway, prompt) == (0, 0)
    for prompt in prompts[:3]:
        predicted, delivered = ask(gateway, prompt)
        assert predicted == delivered > 0, "it was computed after the reset"
