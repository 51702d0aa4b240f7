"""What the simulation found: a table, JSON, or a plot of several speeds."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from rich.table import Table

from gateway.bench.simulate import Outcome

_TIMES = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99")


class PlotFailed(Exception):
    """The plot could not be made; the message says what to do."""


def row(outcome: Outcome, pooled_hit: float) -> dict[str, Any]:
    """Ratios of prompt tokens, seconds, and balance: one policy as JSON.

    ``pooled_hit`` is the same in all rows: the bound that one cache of the total size would set.
    """
    seconds = sorted(outcome.first_token_seconds)

    def percentile(percent: int) -> float:
        return seconds[ceil(len(seconds) * percent / 100) - 1]

    return {
        "policy": outcome.policy,
        "hit": outcome.hit,
        "predicted_hit": outcome.predicted_hit,
        "pooled_hit": pooled_hit,
        "ttft_mean": sum(seconds) / len(seconds),
        "ttft_p50": percentile(50),
        "ttft_p90": percentile(90),
        "ttft_p99": percentile(99),
        "balance": outcome.balance,
    }


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    pooled = rows[0]["pooled_hit"]
    shown = Table(title=title, caption=f"One cache of the total size would hit {pooled:.3f}.")
    shown.add_column("policy")
    for name in ("hit", "predicted", "mean, s", "p50, s", "p90, s", "p99, s", "balance"):
        shown.add_column(name, justify="right")
    for one in rows:
        hits = (f"{one[name]:.3f}" for name in ("hit", "predicted_hit"))
        times = (_seconds(one[name]) for name in _TIMES)
        shown.add_row(one["policy"], *hits, *times, f"{one['balance']:.2f}")
    return shown


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture, its form by the path's suffix; raises PlotFailed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotFailed(
            "a plot needs matplotlib: pip install vllm-affinity-gateway[plot]"
        ) from None
    names = [one["policy"] for one in rows]
    at = range(len(rows))
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    hits, times, balance = figure.subplots(1, 3, sharey=True)
    hits.barh(at, [one["hit"] for one in rows])
    hits.axvline(rows[0]["pooled_hit"], color="black", linestyle=":", label="one pooled cache")
    hits.set(title="hit ratio", xlabel="cached of prompt tokens", yticks=at, yticklabels=names)
    hits.legend(loc="lower right")
    for name in _TIMES:
        times.plot([one[name] for one in rows], at, "o", label=name.removeprefix("ttft_"))
    # Overloaded policies are hundreds of times slower.
    times.set(title="time to first token", xlabel="seconds", xscale="log")
    times.legend()
    balance.barh(at, [one["balance"] for one in rows])
    balance.set(title="balance", xlabel="in flight, fullest worker over mean")
    hits.invert_yaxis()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotFailed(f"{path}: {error}") from error


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
