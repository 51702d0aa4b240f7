"""An HTTP client that hides nothing: the bytes, when each piece came, and how the answer ended."""

from __future__ import annotations

import json
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import urlsplit

TEST_ID_HEADER = "x-test-id"
End = Literal["complete", "cut"]  # cut: FIN or RST before the framing's own end
sent_bodies: dict[str, bytes] = {}  # by test id, of every request sent from here


@dataclass
class Answer:
    """One answer; `pieces` are HTTP chunks (or reads) with their arrival in monotonic seconds."""

    status: int
    headers: list[tuple[str, str]]
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    end: End = "complete"

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        values = [v for n, v in self.headers if n == name.lower()]
        assert len(values) < 2, f"{name} came {len(values)} times: {values}"
        return values[0] if values else None

    def events(self) -> list[bytes]:
        """Of an event stream, each with its closing blank line; a part of one is the last.

        Blank lines between events are none, as for every SSE client.
        """
        *whole, rest = self.body.split(b"\n\n")
        return [each + b"\n\n" for each in whole if each] + ([rest] if rest else [])

    def data(self) -> list[Any]:
        """JSON of each event; the text "[DONE]" for the last."""
        payloads = [each.removeprefix(b"data: ").strip() for each in self.events()]
        return ["[DONE]" if p == b"[DONE]" else json.loads(p) for p in payloads]


class RawClient:
    """One connection. Every read is bounded by `seconds`."""

    def __init__(self, url: str, seconds: float = 10, receive_buffer_bytes: int = 0) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._host = f"{parts.hostname}:{parts.port}"
        self._socket = socket.socket()
        if receive_buffer_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self._socket.settimeout(seconds)
        try:
            self._socket.connect((parts.hostname, parts.port))
        except OSError:
            self._socket.close()
            raise
        self._buffer = bytearray()
        self._method = "GET"
        self._rest: Iterator[bytes] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def close(self) -> None:
        """Leave with FIN (RST where answer bytes lie unread)."""
        self._socket.close()

    def reset(self) -> None:
        """Leave with RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def shut_write(self) -> None:
        """Half-close: FIN, but go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: list[tuple[str, str]] | None = None,
    ) -> str:
        """Send one request; its test id, under which `sent_bodies` has the body."""
        test_id = uuid.uuid4().hex
        self._method = method
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._host}", f"{TEST_ID_HEADER}: {test_id}"]
        lines += [f"{name}: {value}" for name, value in headers or []]
        if body is not None:
            sent_bodies[test_id] = body
            names = {name.lower() for name, _ in headers or []}
            if not names & {"content-length", "transfer-encoding"}:
                lines.append(f"Content-Length: {len(body)}")
            if "content-type" not in names:
                lines.append("Content-Type: application/json")
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        self.send_bytes(head + (body or b""))
        return test_id

    def read_interim(self) -> int:
        """The status of the next head, which is to be a 1xx."""
        return int(self._until(b"\r\n\r\n").split(b" ")[1])

    def read_head(self) -> Answer:
        """The final head (1xx are passed over)."""
        while True:
            status_line, *lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
            status = int(status_line.split(" ")[1])
            pairs = [line.partition(":") for line in lines if line]
            answer = Answer(status, [(n.lower(), v.strip()) for n, _, v in pairs])
            if status >= 200:
                self._rest = self._body(answer)
                return answer

    def read_pieces(self, answer: Answer) -> Iterator[bytes]:
        """Body pieces as they come, each added to `answer` first; sets how it ended.

        May be left and taken up again by another call.
        """
        try:
            for data in self._rest:
                answer.pieces.append((time.monotonic(), data))
                yield data
        except (ConnectionResetError, EOFError):
            answer.end = "cut"

    def read(self) -> Answer:
        answer = self.read_head()
        for _ in self.read_pieces(answer):
            pass
        return answer

    def read_events(self, answer: Answer, count: int) -> None:
        """Read on until `count` whole events of the body are here."""
        pieces = self.read_pieces(answer)
        while answer.body.count(b"\n\n") < count:
            next(pieces)

    def closed_by_peer(self) -> bool:
        """Wait for the peer's FIN or RST; False when bytes came instead."""
        try:
            return not self._buffer and self._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _body(self, answer: Answer) -> Iterator[bytes]:
        length = answer.header("content-length")
        if self._method == "HEAD" or answer.status in (204, 304):
            assert answer.header("transfer-encoding") is None
            return
        if answer.header("transfer-encoding") == "chunked":
            assert length is None, "both content-length and transfer-encoding"
            while size := int(self._until(b"\r\n").partition(b";")[0], 16):
                data = self._exactly(size)
                assert self._exactly(2) == b"\r\n"
                yield data
            while self._until(b"\r\n"):
                pass
        elif length is not None:
            left = int(length)
            while left:
                data = self._some(left)
                left -= len(data)
                yield data
        else:
            while True:
                try:
                    yield self._some(1 << 20)
                except EOFError:
                    return

    def _until(self, mark: bytes) -> bytes:
        while (end := self._buffer.find(mark)) < 0:
            self._fill()
        found = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return found

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        return self._some(size)

    def _some(self, limit: int) -> bytes:
        if not self._buffer:
            self._fill()
        data = bytes(self._buffer[:limit])
        del self._buffer[: len(data)]
        return data

    def _fill(self) -> None:
        data = self._socket.recv(256 * 1024)
        if not data:
            raise EOFError
        self._buffer += data


def exchange(
    url: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    method: str | None = None,
    headers: list[tuple[str, str]] | None = None,
    seconds: float = 10,
) -> Answer:
    """One request on a connection of its own, to its end. A dict is sent as JSON."""
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    with RawClient(url, seconds) as client:
        client.send(method or ("GET" if raw is None else "POST"), path, raw, headers)
        return client.read()
