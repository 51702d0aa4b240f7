"""Routes of the fake worker, and the scripts played on them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.fake_worker.connection import Connection, Headers, Received, Writer
from tests.fake_worker.engine import Engine
from tests.fake_worker.openai_json import CREATED, Generation, dump, error, error_event
from tests.fake_worker.other_json import Message, Response
from tests.fake_worker.script import SCRIPT_HEADER, Script

JSON: Headers = [(b"content-type", b"application/json")]
EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
PLAIN_PIECE_BYTES = 64 * 1024
SHAPES: dict[str, type[Generation]] = {
    "/v1/chat/completions": Generation,
    "/v1/completions": Generation,
    "/v1/messages": Message,
    "/v1/responses": Response,
}

__all__ = ["FakeServer", "Received"]


class Cut(Exception):
    """The script wants the answer to break here."""


class FakeServer:
    """State and behaviour of one fake worker; everything here runs in its loop's thread."""

    def __init__(
        self,
        model: str,
        *,
        root: str | None,
        max_model_len: int,
        force_include_usage: bool,
        changed: Callable[[], None],
    ) -> None:
        self.engine = Engine(model)
        self.root = root if root is not None else model
        self.max_model_len = max_model_len
        self.force_include_usage = force_include_usage
        self.health: int | None = 200  # None: never answers
        self.adapters: list[str] = []  # LoRA names, as vLLM lists them beside their base model
        self.dev_mode = False  # vLLM's: /reset_prefix_cache is served in it only
        self.mute = False  # no request of any kind is answered
        self.tokenize: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self.server_info: dict[str, Any] | None = None
        self.default = Script()
        self.once: deque[Script] = deque()  # each used for one request, before `default`
        self.received: list[Received] = []
        self.connections: list[Connection] = []
        self._changed = changed
        self._numbers = itertools.count()
        self._gates: dict[str, asyncio.Event] = {}

    def connect(self) -> Connection:
        connection = Connection(next(self._numbers), self._serve, lambda _: self._changed())
        self.connections.append(connection)
        return connection

    def gate(self, name: str) -> asyncio.Event:
        return self._gates.setdefault(name, asyncio.Event())

    def reset(self) -> None:
        """Forget what was received, every script and who waits; cache and counters stay."""
        for connection in self.connections:
            if connection.busy:
                connection.abort()
        self.default = Script()
        self.once.clear()
        self.received.clear()
        self.connections = [c for c in self.connections if c.open]
        self._gates.clear()
        self.health, self.mute = 200, False

    async def _serve(self, connection: Connection, received: Received) -> None:
        self.received.append(received)
        self._changed()
        if self.mute:
            await asyncio.Event().wait()
        if received.is_inference and received.method == "POST":
            await self._inference(connection, received)
        else:
            await self._control(connection, received)

    async def _control(self, connection: Connection, received: Received) -> None:
        writer = Writer(connection, Script(), received)
        status, kind, body = self._control_answer(received)
        if received.path == "/health" and self.health is None:
            await asyncio.Event().wait()
        await writer.head(status, kind, len(body))
        await writer.data(body)
        await writer.end()

    def _control_answer(self, received: Received) -> tuple[int, Headers, bytes]:
        match received.path:
            case "/health":
                return self.health or 503, [], b""
            case "/v1/models":
                return 200, JSON, dump(self._models())
            case "/metrics":
                text = [(b"content-type", b"text/plain; version=1.0.0; charset=utf-8")]
                return 200, text, self.engine.metrics().encode()
            case "/version":
                return 200, JSON, dump({"version": "0.0.0+fake"})
            case "/tokenize" if self.tokenize:
                return 200, JSON, dump(self.tokenize(json.loads(received.body)))
            case "/reset_prefix_cache" if self.dev_mode:
                free = not self.engine.running
                if free:
                    self.engine.cache.clear()
                return 200, JSON, dump({"success": free})
            case "/server_info" if self.server_info:
                return 200, JSON, dump(self.server_info)
            case path if path in SHAPES:
                return 405, JSON, error("Method Not Allowed", 405, "MethodNotAllowed")
            case _:
                return 404, JSON, error("Not Found", 404, "NotFoundError")

    def _models(self) -> dict[str, Any]:
        card = {
            "id": self.engine.model,
            "object": "model",
            "created": CREATED,
            "owned_by": "vllm",
            "root": self.root,
            "parent": None,
            "max_model_len": self.max_model_len,
            "permission": [{"id": "modelperm-1", "object": "model_permission", "created": CREATED}],
        }
        adapters = [
            {**card, "id": name, "root": f"/adapters/{name}", "parent": card["id"]}
            for name in self.adapters
        ]
        return {"object": "list", "data": [card, *adapters]}

    async def _inference(self, connection: Connection, received: Received) -> None:
        script = self._script(received)
        writer = Writer(connection, script, received)
        self.engine.running += 1
        try:
            await self._play(script, writer, received)
        except Cut:
            connection.reset() if script.cut == "rst" else connection.close()
        except (asyncio.CancelledError, ConnectionResetError):
            self.engine.aborted += 1
            raise
        finally:
            self.engine.running -= 1
            self._changed()

    def _script(self, received: Received) -> Script:
        wanted = received.header(SCRIPT_HEADER.decode())
        if wanted is not None:
            try:
                return Script.from_json(wanted)
            except (TypeError, ValueError) as exc:
                return Script(status=500, body=f"bad script: {exc}")
        return self.once.popleft() if self.once else self.default

    async def _play(self, script: Script, writer: Writer, received: Received) -> None:
        raw = received.body
        if script.hold:
            await asyncio.Event().wait()
        await self._phase(script, "head", script.head_delay_seconds)
        if script.cut and script.cut_after is None:
            raise Cut
        if script.instead is not None:
            await writer.raw(script.instead.encode("latin-1"))
            raise Cut
        refused = self._refused(script, raw)
        if refused is not None:
            status, answer = refused
            await self._plain(script, writer, status, answer)
            return
        body = json.loads(raw)
        generation = self._generation(script, body, SHAPES[received.path])
        if body.get("stream"):
            await self._stream(script, writer, body, generation)
        else:
            usage = script.usage is not False
            size = script.size_bytes
            answer = generation.plain(usage) if size is None else b""
            await self._plain(script, writer, 200, answer)

    def _refused(self, script: Script, raw: bytes) -> tuple[int, bytes] | None:
        """(status, body) where the script or the request's own fault asks for one."""
        if script.status != 200:
            said = script.body
            if said is None:
                said = json.loads(error(f"scripted {script.status}", script.status, "Scripted"))
            return script.status, said.encode() if isinstance(said, str) else dump(said)
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            return 400, error(f"[{{'type': 'json_invalid', 'msg': '{exc}'}}]", 400, "Bad Request")
        if not isinstance(body, dict) or not isinstance(body.get("messages", []), list):
            return 400, error("[{'type': 'list_type'}]", 400, "Bad Request")
        model = body.get("model", self.engine.model)
        if model not in (self.engine.model, *self.adapters):
            message = f"The model `{model}` does not exist."
            return 404, error(message, 404, "NotFoundError", "model")
        if (body.get("max_tokens") or 0) > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            return 400, error(message, 400, "BadRequestError", "max_tokens")
        return None

    def _generation(
        self, script: Script, body: dict[str, Any], shape: type[Generation]
    ) -> Generation:
        chat = "messages" in body
        limits = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        limit = next((body[name] for name in limits if body.get(name)), 8)
        prompt_tokens, cached_tokens = self.engine.prefill(body)
        return shape(
            id=("chatcmpl-" if chat else "cmpl-") + f"{next(self._numbers):08x}",
            model=self.engine.model,
            chat=chat,
            choices=body.get("n") or 1,
            tokens=script.tokens if script.tokens is not None else min(limit, 64),
            text=script.text,
            finish_reason=script.finish_reason,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
        )

    async def _plain(self, script: Script, writer: Writer, status: int, answer: bytes) -> None:
        headers = JSON if answer or script.size_bytes else []
        length = script.size_bytes if script.size_bytes and not answer else len(answer)
        await writer.head(status, headers, length)
        await self._phase(script, "body", script.body_delay_seconds)
        sent = 0
        async for piece in _pieces(answer, length):
            if script.cut and script.cut_after is not None:
                piece = piece[: script.cut_after - sent]
            await writer.data(piece)
            sent += len(piece)
            if script.cut and sent == script.cut_after:
                if script.cut == "clean":
                    break
                raise Cut
        await writer.end()

    async def _stream(
        self, script: Script, writer: Writer, body: dict[str, Any], generation: Generation
    ) -> None:
        options = body.get("stream_options") or {}
        wanted = bool(options.get("include_usage"))
        continuous = wanted and bool(options.get("continuous_usage_stats"))
        if self.force_include_usage:
            wanted = continuous = True
        if script.usage is False:
            wanted = continuous = False
        events = generation.events(wanted, continuous)
        if script.error_event and isinstance(generation, Message):
            events = [*events[:2], generation.failed()]
        elif script.error_event:
            failed = error_event("EngineCore died", 500, "InternalServerError")
            events = [*events[:2], failed, events[-1]]
        if script.events is not None:
            events = [each.encode() for each in script.events]
        await writer.head(200, EVENT_STREAM, None)
        await self._phase(script, "body", script.body_delay_seconds)
        for number, each in enumerate(events):
            if script.cut and script.cut_after == number:
                await writer.data(each[: script.cut_inside])
                if script.cut == "clean":
                    break
                raise Cut
            await self._phase(script, str(number), script.gap_seconds if number else 0)
            await writer.data(each)
            if 0 < number < len(events) - 1:
                self.engine.decode_step(generation.choices)
        await writer.end()

    async def _phase(self, script: Script, name: str, delay_seconds: float) -> None:
        if delay_seconds:
            await asyncio.sleep(delay_seconds)
        if name in script.gates:
            await self.gate(script.gates[name]).wait()


async def _pieces(answer: bytes, length: int) -> AsyncIterator[bytes]:
    """`answer` in pieces, or, where there is none, a JSON string of `length` bytes."""
    if answer or not length:
        for at in range(0, len(answer), PLAIN_PIECE_BYTES):
            yield answer[at : at + PLAIN_PIECE_BYTES]
        return
    filler = b"x" * PLAIN_PIECE_BYTES
    yield b'"'
    left = length - 2
    while left > 0:
        yield filler[:left]
        left -= len(filler)
    yield b'"'
