"""Answers of HTTP/1.1 as bytes, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """`data` is written whole; `eof`: the connection's end is the answer's. `reusable`: whether the
    connection may carry another exchange."""

    name: str
    data: bytes
    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    eof: bool = False
    reusable: bool = True

    def __str__(self) -> str:
        return self.name


TE = (b"transfer-encoding", b"chunked")
LENGTH_5 = (b"content-length", b"5")

ANSWERS = [
    Answer(
        "content-length",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        body=b"hello",
        headers=(LENGTH_5,),
    ),
    Answer(
        "no body",
        b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n",
        status=201,
        headers=((b"content-length", b"0"),),
    ),
    Answer(
        "chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nhel\r\n2;name=value\r\nlo\r\n0\r\n\r\n",
        body=b"hello",
        headers=(TE,),
    ),
    Answer(
        "chunked of nothing",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        headers=(TE,),
    ),
    Answer(
        "trailers",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nA: 1\r\n\r\n"
        b"5\r\nhello\r\n0\r\nX-Trailer: late\r\nA: 2\r\n\r\n",
        body=b"hello",
        headers=(TE, (b"a", b"1")),
    ),
    Answer(
        "headers as they were",
        b"HTTP/1.1 429 Too Many\r\nSet-Cookie: a=1\r\nX-Odd:  two words\r\nSET-COOKIE: b=2\r\n"
        b"X-Empty:\r\ncontent-length: 5\r\n\r\nhello",
        status=429,
        body=b"hello",
        headers=(
            (b"set-cookie", b"a=1"),
            (b"x-odd", b"two words"),
            (b"set-cookie", b"b=2"),
            (b"x-empty", b""),
            LENGTH_5,
        ),
    ),
    Answer(
        "interim answers",
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        body=b"hello",
        headers=(LENGTH_5,),
    ),
    Answer("204", b"HTTP/1.1 204 No Content\r\nA: 1\r\n\r\n", status=204, headers=((b"a", b"1"),)),
    Answer(
        "304", b"HTTP/1.1 304 Not Modified\r\nA: 1\r\n\r\n", status=304, headers=((b"a", b"1"),)
    ),
    Answer(
        "until the end",
        b"HTTP/1.1 200 OK\r\nA: 1\r\n\r\nhello",
        body=b"hello",
        headers=((b"a", b"1"),),
        eof=True,
        reusable=False,
    ),
    Answer("nothing until the end", b"HTTP/1.1 200 OK\r\n\r\n", eof=True, reusable=False),
    Answer(
        "connection: close",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        body=b"hello",
        headers=((b"connection", b"close"), LENGTH_5),
        reusable=False,
    ),
    Answer(
        "HTTP/1.0",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        body=b"hello",
        headers=(LENGTH_5,),
        reusable=False,
    ),
    Answer(
        "HTTP/1.0 until the end",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        body=b"hello",
        eof=True,
        reusable=False,
    ),
]
