"""Stands in for one vLLM server's processes: the API server, its engine core, the core's worker.

Each writes its pid to a file named after its part in $GATEWAY_GC_DIR, and then lives until it is
killed, whatever happens to the others, as vLLM's do. Traits are given as the first argument:

    stubborn    all ignore SIGTERM
    leaving     the worker moves to a session of its own
    exit=N      the API server writes three lines and exits with N when the others are there
    quick=N     it does so before it starts any other
"""

import os
import signal
import sys
import time
from pathlib import Path

PARTS = ("api", "core", "worker")


def write_pid(part: str) -> None:
    path = Path(os.environ["GATEWAY_GC_DIR"]) / part
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def leave(status: str) -> None:
    for number in range(3):
        print(f"line {number} of {os.getpid()}", flush=True)
    os._exit(int(status))


def main() -> None:
    traits = dict(trait.partition("=")[::2] for trait in sys.argv[1].split(","))
    if "quick" in traits:
        leave(traits["quick"])
    if "stubborn" in traits:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = "api"
    for child in ("core", "worker"):
        if os.fork() > 0:
            break
        part = child
    if part == "worker" and "leaving" in traits:
        os.setsid()
    write_pid(part)
    if part == "api" and "exit" in traits:
        while not all((Path(os.environ["GATEWAY_GC_DIR"]) / name).exists() for name in PARTS):
            time.sleep(0.01)
        leave(traits["exit"])
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
