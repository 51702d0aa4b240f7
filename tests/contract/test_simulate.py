"""`gateway simulate` as a user runs it, on a slice of the trace and on all of it."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.gateway_process import REPOSITORY

TRACE = REPOSITORY / "tests" / "bench" / "data" / "conversation_trace.jsonl.xz"
FIELDS = {
    "policy", "hit", "predicted_hit", "pooled_hit",
    "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "balance",
}  # fmt: skip
PEERS = ["cache_aware", "llm_d_approximate", "llm_d_precise", "dynamo",
         "least_work", "round_robin", "random", "sticky"]  # fmt: skip

pytestmark = pytest.mark.timeout(300)
"""Seconds: nine policies replay the whole trace, on a machine that may be busy."""

Row = dict[str, Any]


def simulate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway", "simulate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=280)


def rows(*arguments: object) -> list[Row]:
    done = simulate(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: list[Row] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 600 requests of the trace."""
    path = tmp_path_factory.mktemp("trace") / "part.jsonl"
    with lzma.open(TRACE, "rt", encoding="utf-8") as lines:
        path.write_text("".join(islice(lines, 600)), encoding="utf-8")
    return path


def test_a_slice_gives_a_row_for_each_policy_ours_first(part: Path) -> None:
    found = rows(part, "--workers", 4, "--speed", 2)
    assert [one["policy"] for one in found] == ["default", *PEERS]
    for one in found:
        assert set(one) == FIELDS
        assert 0 < one["hit"] <= one["pooled_hit"] + 0.05
        assert 0 < one["ttft_p50"] <= one["ttft_p90"] <= one["ttft_p99"]
        assert 1 <= one["balance"] <= 4
    assert found == rows(part, "--workers", 4, "--speed", 2), "nothing in it is left to chance"


def test_the_gateways_own_form_gives_the_same(part: Path, tmp_path: Path) -> None:
    """Its lines come as requests end, name their block size, and start at another time."""
    own = tmp_path / "own.jsonl"
    with part.open() as lines:
        records = [json.loads(line) for line in lines]
    for number, record in enumerate(records):
        # Requests of one instant stay in order: which came first is then told by the file alone.
        record["timestamp"] += 1_700_000_000_000 + number / 1000
        record["finished"] = record["timestamp"] + record["output_length"] * 20
        record["block_size"] = 512
        record["hash_ids"] = record["hash_ids"][: record["input_length"] // 512]
    records.sort(key=lambda record: record["finished"])
    own.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    first, second = rows(part, "--workers", 2)[0], rows(own, "--workers", 2)[0]
    assert second["hit"] == first["hit"]
    assert second["ttft_mean"] == pytest.approx(first["ttft_mean"], rel=0.01)


def test_settings_change_what_is_simulated(part: Path) -> None:
    usual = rows(part, "--workers", 2)[0]
    assert rows(part, "--workers", 2, "--cache-tokens", 20_000)[0]["hit"] < usual["hit"]
    slow = rows(part, "--workers", 2, "--token-seconds", 1e-3, "--output-token-seconds", 0)[0]
    assert slow["ttft_p50"] > 10 * usual["ttft_p50"]
    assert rows(part, "--workers", 2, "--social-weight", 0)[0] != usual


def test_a_table_and_a_plot(part: Path, tmp_path: Path) -> None:
    picture = tmp_path / "found.png"
    done = simulate(part, "--workers", 2, "--plot", picture)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("default", *PEERS, "hit", "p99", "balance", "One cache of the total size"):
        assert word in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "arguments", "why"),
    [
        (None, (), "No such file"),
        ("", (), "no requests"),
        ("{", (), "line 1: not JSON"),
        ('{"timestamp": 0, "input_length": -3}', (), "line 1: input_length"),
        ('{"timestamp": 0, "input_length": 3, "output_length": -1, "hash_ids": []}', (),
         "line 1: output_length"),
        ('{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": []}\n'
         '{"timestamp": 4, "input_length": 3, "output_length": 1, "hash_ids": []}', (),
         "line 2: earlier than the line before"),
        ("{", ("--workers", 0), "--workers 0: Input should be greater than or equal to 1"),
        ("{", ("--workers", "two"), "--workers two: Input should be a valid integer"),
        ("{", ("--speed", 0), "--speed 0: Input should be greater than 0"),
        ("{", ("--speed", "nan"), "--speed nan: Input should be"),
        ('{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": []}',
         ("--plot", "missing/found.png"), "missing/found.png"),
    ],
)  # fmt: skip
def test_what_cannot_be_simulated_ends_with_one_line(
    tmp_path: Path, line: str | None, arguments: tuple[object, ...], why: str
) -> None:
    log = tmp_path / "log.jsonl"
    if line is not None:
        log.write_text(line)
    done = simulate(log, *arguments)
    assert done.returncode == 2
    assert why in done.stderr and done.stderr.count("\n") == 1


# --- the figures that chose the rule: design, section 8


@pytest.fixture(scope="module", params=[3, 4, 5])
def whole(request: pytest.FixtureRequest) -> tuple[int, dict[str, Row]]:
    found = rows(TRACE, "--workers", 8, "--speed", request.param)
    return request.param, {one["policy"]: one for one in found}


def test_no_peer_is_better(whole: tuple[int, dict[str, Row]]) -> None:
    _, found = whole
    ours = found["default"]
    for name in PEERS:
        peer = found[name]
        assert ours["ttft_mean"] <= peer["ttft_mean"], name
        assert ours["ttft_p99"] <= peer["ttft_p99"], name
        assert ours["hit"] >= peer["hit"] - 0.01, name


def test_c55_hits_do_not_fall_where_load_rises(whole: tuple[int, dict[str, Row]]) -> None:
    """Below, at and above what the workers can serve."""
    _, found = whole
    assert found["default"]["hit"] >= 0.93 * found["default"]["pooled_hit"]
    assert found["default"]["balance"] <= 1.1


BOUND_AT_ONCE = {3: (0.76, 7.7, 0.240), 4: (1.49, 8.8, 0.239), 5: (51.5, 89, 0.251)}
"""Mean and 99th percentile in seconds, hit ratio."""


def test_the_default_has_the_figures_that_chose_it(whole: tuple[int, dict[str, Row]]) -> None:
    speed, found = whole
    mean, p99, hit = BOUND_AT_ONCE[speed]
    ours = found["default"]
    assert ours["ttft_mean"] <= mean * 1.01
    assert ours["ttft_p99"] <= p99 * 1.01
    assert ours["hit"] >= hit - 0.002


NOT_REACHED = None
"""What stays further from its row than a tenth: the formula does better here than it did there."""

ROWS = {
    "least_work": {3: (1.06, 7.7, 0.074), 4: (38.4, 65, 0.076), 5: (129, 238, 0.074)},
    "dynamo": {3: (NOT_REACHED, 7.5, 0.143), 4: (6.66, 18.6, 0.139), 5: (91.3, 172, 0.143)},
    "cache_aware": {
        3: (NOT_REACHED, NOT_REACHED, 0.242),
        4: (NOT_REACHED, NOT_REACHED, 0.244),
        5: (55.8, 147, 0.223),
    },
}


@pytest.mark.parametrize("policy", ROWS)
def test_each_peer_lands_by_its_row(whole: tuple[int, dict[str, Row]], policy: str) -> None:
    speed, found = whole
    for name, wanted in zip(("ttft_mean", "ttft_p99", "hit"), ROWS[policy][speed], strict=True):
        if wanted is not NOT_REACHED:
            assert found[policy][name] == pytest.approx(wanted, rel=0.1), name


def test_one_pooled_cache_is_the_bound(whole: tuple[int, dict[str, Row]]) -> None:
    for one in whole[1].values():
        assert one["pooled_hit"] == pytest.approx(0.254, abs=5e-4)


def test_the_studys_map_puts_all_on_one_worker(whole: tuple[int, dict[str, Row]]) -> None:
    assert whole[1]["sticky"]["balance"] == pytest.approx(8.0)
