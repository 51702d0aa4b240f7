"""What `gateway up` shows on the terminal while its workers load and when one ends."""

from __future__ import annotations

from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from gateway.workers.supervisor import WorkerExited

_QUESTION = (
    '{{"model": "{model}", "temperature": 0, "messages": '
    '[{{"role": "user", "content": "What is the capital of France?"}}]}}'
)
_CURL = (
    "curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n  -d '"
    + _QUESTION
    + "'"
)


class Screen:
    """Lines for what happened; on a terminal also a moving line for what is awaited."""

    def __init__(self, url: str, devices: dict[str, str]) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._url = url
        self._devices = devices
        self._since: dict[str, float] = {}
        self._loading: set[str] = set(devices)
        self._greeted = False
        self._status: Status | None = None

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    def started(self, worker: str, pid: int) -> None:
        self._since[worker] = monotonic()
        self._loading.add(worker)
        self.say(f"worker {worker} ({self._devices[worker]}): loading, pid {pid}")
        self._show_loading()

    def ready(self, worker: str, model: str) -> None:
        seconds = monotonic() - self._since[worker]
        self._loading.discard(worker)
        self.say(f"worker {worker} ({self._devices[worker]}): ready after {seconds:.0f} s")
        self._show_loading()
        if not self._loading and not self._greeted:
            self._greeted = True
            self._greet(model)

    def exited(self, event: WorkerExited) -> None:
        self._loading.discard(event.worker_id)
        self._show_loading()
        self.say(f"worker {event.worker_id}: {event.reason}")
        if event.restart_in_seconds is None:
            return
        for line in event.last_log_lines:
            self.say(f"  | {line}")
        self.say(f"worker {event.worker_id}: starts again in {event.restart_in_seconds:g} s")

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _greet(self, model: str) -> None:
        self.say(f"\nready: {self._url}   model: {model}   docs: {self._url}/docs\n")
        self.say(_CURL.format(url=self._url, model=model) + "\n")

    def _show_loading(self) -> None:
        if not self._console.is_terminal:
            return
        self.close()
        if self._loading:
            names = ", ".join(sorted(self._loading))
            self._status = self._console.status(f"loading worker {names} (Ctrl-C stops)")
            self._status.start()
