"""All measurements, side by side, as tables and as JSON: ``run.py [--only NAME] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench import affinity, start

PAIRS = 3

SECTIONS: dict[str, Callable[[], dict[str, object]]] = {
    "start": lambda: start.measure(3),
    "affinity": lambda: affinity.measure(PAIRS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, object] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
    }
    for name in arguments.only or SECTIONS:
        print(f"\n== {name}", flush=True)
        results[name] = SECTIONS[name]()
        print(json.dumps(results[name], indent=1), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
