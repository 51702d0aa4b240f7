"""The gateway as somebody with a terminal meets it."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.up_process import MODEL_NAME, UpProcess

pytestmark = pytest.mark.timeout(420)


def run(command: str) -> str:
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_the_command_that_up_prints(up: UpProcess) -> None:
    log = up.log()
    printed = log[log.index("curl ") :].split("\n\n")[0]
    assert up.url in log and MODEL_NAME in log and "ready" in log
    answer = json.loads(run(printed.replace("curl ", "curl -sS ", 1)))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_stream(up: UpProcess) -> None:
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 5,
            "stream": True,
        }
    )
    url = f"{up.url}/v1/chat/completions"
    out = run(f"curl -sSN -i {url} -H 'content-type: application/json' -d '{body}'")
    head, _, events = out.replace("\r\n", "\n").partition("\n\n")
    assert "x-accel-buffering: no" in head and "cache-control: no-cache" in head
    assert events.endswith("data: [DONE]\n\n")


def test_health_and_documentation(up: UpProcess) -> None:
    assert json.loads(run(f"curl -sS {up.url}/health")) == {"status": "ok"}
    assert json.loads(run(f"curl -sS {up.url}/ready"))["workers"] == {"0": "ready", "1": "ready"}
    schema = json.loads(run(f"curl -sS {up.url}/openapi.json"))
    documented = {
        *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}"),
        *("/v1/responses", "/v1/messages"),
        *("/health", "/ready", "/metrics", "/route/explain", "/admin/reset_prefix_cache"),
    }
    assert set(schema["paths"]) == documented
    page = run(f"curl -sS {up.url}/docs")
    assert "http" not in page.replace("http-equiv", ""), "the page must not load from elsewhere"
    script = page.split('<script src="')[1].split('"')[0]
    assert len(run(f"curl -sS {up.url}{script}")) > 100_000


def test_hit_ratio_moves_when_a_document_is_asked_twice(up: UpProcess) -> None:
    text = "Our office has 12 rooms and 3 doors; " * 40
    body = {"model": MODEL_NAME, "max_tokens": 4}
    before = up.total("gateway_delivered_cached_tokens_total")
    for question in ("How many rooms?", "How many doors?"):
        body["messages"] = [{"role": "user", "content": text + question}]
        url = f"{up.url}/v1/chat/completions"
        command = f"curl -sS {url} -H 'content-type: application/json' -d @- <<< '"
        run(command + json.dumps(body) + "'")
    assert up.total("gateway_delivered_cached_tokens_total") >= before + 300
    assert up.total("gateway_cache_hit_ratio") > 0
