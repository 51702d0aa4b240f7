"""A process that owns workers as the gateway does: `owner.py STATE_FOLDER LOOP TRAITS`."""

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from gateway.workers.launch import LaunchPlan
from gateway.workers.supervisor import Event, Supervisor, SupervisorOptions, WorkerStarted
from tests.unit.workers.processes import FAKE_ENGINE, engine_pids

# `raise`: an error ends the event loop while the workers run; `wait`: until it is killed
TRAIT_RAISE = "raise"


async def own(state_folder: Path, trait: str) -> None:
    started = asyncio.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, WorkerStarted):
            started.set()

    plan = LaunchPlan("0", "nothing", (sys.executable, FAKE_ENGINE, ""), os.environ, None, None)
    options = SupervisorOptions(state_folder, unserved_grace_seconds=0.2)
    supervisor = Supervisor([plan], options, on_event)
    await supervisor.start()
    await started.wait()
    if trait == TRAIT_RAISE:
        engine_pids(state_folder / "gc" / "0" / "1")
        raise SystemExit("the owner fails")
    await asyncio.Event().wait()


if __name__ == "__main__":
    run = uvloop.run if sys.argv[2] == "uvloop" else asyncio.run
    run(own(Path(sys.argv[1]), sys.argv[3]))
