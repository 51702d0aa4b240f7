"""A fake worker to play with by hand: python -m tests.fake_worker PORT."""

import sys
import threading

from tests.fake_worker.thread import FakeWorker

with FakeWorker(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as worker:
    print(worker.url, flush=True)
    threading.Event().wait()
