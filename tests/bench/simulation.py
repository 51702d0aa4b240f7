"""The conversation trace on 8 simulated workers: the default beside the best peer of each."""

from __future__ import annotations

from pathlib import Path

from gateway.simulated import compare
from tests.bench.figures import Figure, as_json, print_figures

TRACE = Path(__file__).parent / "data" / "conversation_trace.jsonl.xz"
WORKERS, SPEEDS = 8, (3, 4, 5)
HIT_RATIO_SLACK = 0.01


def measure() -> dict[str, object]:
    figures: list[Figure] = []
    rows: dict[int, object] = {}
    for speed in SPEEDS:
        ours, *peers = rows[speed] = compare(TRACE, {"workers": WORKERS, "speed": speed})
        for name, unit in (("ttft_mean", "s"), ("ttft_p99", "s")):
            best = min(peers, key=lambda peer: peer[name])
            figures.append(
                Figure(f"{name} at {speed}", ours[name], "<=", best[name], unit, best["policy"])
            )
        best = max(peers, key=lambda peer: peer["hit"])
        least = best["hit"] - HIT_RATIO_SLACK
        figures.append(Figure(f"hit at {speed}", ours["hit"], ">=", least, "", best["policy"]))
    print_figures(figures)
    return {"figures": as_json(figures), "rows": rows}
