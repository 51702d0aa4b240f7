"""A real Prometheus scrapes the gateway and answers the questions that a dashboard asks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.documents import questions, send_burst
from tests.gateway_process import free_port
from tests.up_process import MODEL_NAME, UpProcess
from tests.waiting import until

pytestmark = pytest.mark.timeout(420)

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: gateway
    static_configs: [{{targets: ["{target}"]}}]
"""

HIT_RATIO = (
    "sum(rate(gateway_delivered_cached_tokens_total[1m]))"
    " / sum(rate(gateway_prompt_tokens_total[1m]))"
)


class Prometheus:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False)

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.ConnectError:
            return False

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The instant vector; each entry has ``metric`` and ``value``."""
        answer = self._client.get("/api/v1/query", params={"query": promql}).json()
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def number(self, promql: str) -> float | None:
        found = self.query(promql)
        return float(found[0]["value"][1]) if found else None


@pytest.fixture(scope="module")
def prometheus(up: UpProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: apt-get install prometheus"
    folder: Path = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    config.write_text(CONFIG.format(target=up.url.removeprefix("http://")))
    port = free_port()
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        until("prometheus is ready", server.ready, 30)
        until("a scrape succeeded", lambda: server.number('up{job="gateway"}') == 1, 30)
        yield server
        server.close()
    finally:
        process.terminate()
        process.wait(20)


def test_the_whole_page_is_accepted(prometheus: Prometheus) -> None:
    families = prometheus.number('count(count by (__name__)({job="gateway"}))')
    assert families is not None and families > 40
    assert prometheus.number("sum(gateway_worker_up)") == 2


def test_cache_hit_ratio_and_occupancy(prometheus: Prometheus, up: UpProcess) -> None:
    two_scrapes = prometheus.number("count_over_time(up[1m])") or 0
    until(
        "two scrapes came before the burst",
        lambda: (prometheus.number("count_over_time(up[1m])") or 0) >= two_scrapes + 2,
        30,
    )
    burst = send_burst(up.url, MODEL_NAME, questions(11, 4, 4, 700))
    until(
        "the ratio is the burst's",
        lambda: abs((prometheus.number(HIT_RATIO) or 0) - burst.cached_share) < 0.15,
        30,
    )
    peak = "max(max_over_time(gateway_batch_occupancy_ratio[2m]))"
    occupancy = until("the batch was seen busy", lambda: prometheus.number(peak), 30)
    assert 0 < occupancy <= 1
    tokens = "max(max_over_time(gateway_batch_token_occupancy_ratio[2m]))"
    assert until("tokens per step were seen", lambda: prometheus.number(tokens), 30) > 0
    workers = prometheus.query("gateway_cache_hit_ratio")
    assert {entry["metric"]["worker"] for entry in workers} == {"0", "1"}


def test_gc_pauses(prometheus: Prometheus) -> None:
    quantile = (
        "histogram_quantile(0.99, sum by (le, process, worker) (gateway_gc_pause_seconds_bucket))"
    )
    found = {
        (entry["metric"]["worker"], entry["metric"]["process"]): float(entry["value"][1])
        for entry in prometheus.query(quantile)
    }
    assert ("gateway", "gateway") in found
    for worker in ("0", "1"):
        assert 0 < found[worker, "engine_core"] < 10
