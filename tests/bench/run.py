"""All measurements, side by side, as tables and as JSON: ``run.py [--only NAME] [--json FILE]``.

The exit status tells whether all could be measured, not whether bounds were met.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import (
    affinity,
    dataplane,
    index,
    placement,
    shared_prefix,
    simulation,
    start,
    streams,
    tokenising,
)
from tests.bench.figures import CannotMeasure

PAIRS = 3

Section = Callable[[argparse.Namespace], dict[str, object]]
SECTIONS: dict[str, Section] = {
    "start": lambda _: start.measure(3),
    "dataplane": lambda asked: dataplane.measure(asked.seconds, asked.rounds, asked.peers),
    "streams": lambda _: streams.measure(),
    "placement": lambda _: placement.measure(),
    "tokenising": lambda _: tokenising.measure(),
    "index": lambda _: index.measure(),
    "simulation": lambda _: simulation.measure(),
    "shared_prefix": lambda _: shared_prefix.measure(),
    "affinity": lambda _: affinity.measure(PAIRS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="dataplane: ours alone"
    )
    parser.add_argument("--seconds", type=int, default=6, help="dataplane: of each load")
    parser.add_argument("--rounds", type=int, default=3, help="dataplane: turns of each gateway")
    asked = parser.parse_args()
    results: dict[str, object] = {"machine": _machine(), "python": platform.python_version()}
    failed = [name for name in asked.only or SECTIONS if not _run(name, asked, results)]
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        print(f"\nnot measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, asked: argparse.Namespace, results: dict[str, object]) -> bool:
    print(f"\n== {name}", flush=True)
    try:
        results[name] = SECTIONS[name](asked)
    except CannotMeasure as why:
        print(why, file=sys.stderr)
        return False
    except (AssertionError, OSError, subprocess.SubprocessError):
        traceback.print_exc()  # the other sections can be measured all the same
        return False
    print(json.dumps(results[name], indent=1), flush=True)
    return True


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {platform.machine()} {model}, load {load:.1f} at start"


if __name__ == "__main__":
    sys.exit(main())
