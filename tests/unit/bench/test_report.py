from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gateway.bench.report import PlotFailed, plot, row, table
from gateway.bench.simulate import Outcome

OUTCOME = Outcome(
    "default",
    prompt_tokens=1000,
    delivered_tokens=250,
    predicted_tokens=300,
    first_token_seconds=[float(i) for i in range(200, 0, -1)],
    in_flight_seconds=[3.0, 1.0],
)
ROW = row(OUTCOME, 0.4)


def test_a_row_is_one_policy_in_figures() -> None:
    assert ROW == {
        "policy": "default",
        "hit": 0.25,
        "predicted_hit": 0.3,
        "pooled_hit": 0.4,
        "ttft_mean": 100.5,
        "ttft_p50": 100.0,
        "ttft_p90": 180.0,
        "ttft_p99": 198.0,
        "balance": 1.5,
    }


def test_the_table_has_a_line_for_each_policy() -> None:
    console = Console(width=120, file=StringIO())
    console.print(table([ROW, {**ROW, "policy": "random", "ttft_mean": 0.01234}], "a log"))
    text = console.file.getvalue()
    assert "default" in text and "random" in text and "0.0123" in text and "198" in text
    assert "would hit 0.400" in text


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_plot_is_a_picture(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"found.{suffix}"
    plot([ROW, {**ROW, "policy": "random"}], path)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[suffix])


@pytest.mark.parametrize("name", ["missing/found.png", "found.what"])
def test_a_plot_that_cannot_be_written_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlotFailed, match="found"):
        plot([ROW], tmp_path / name)


def test_without_matplotlib_the_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotFailed, match=r"pip install .*\[plot\]"):
        plot([ROW], tmp_path / "found.png")
