"""A vLLM plugin of the tests: SIGUSR1 makes the process collect its garbage, all generations."""

import gc
import signal


def register() -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: gc.collect())
