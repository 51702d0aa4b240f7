from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bench.trace import Arrival, TraceError, read_trace
from gateway.core.blocks import BlockHash, Chain

LINE = {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]}
OWN = {"block_size": 16, "finished": 9000}


def line(**changed: Any) -> str:
    return json.dumps({**LINE, **changed})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{one}\n" for one in lines), encoding="utf-8")
    return path


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Arrival]]:
    return lambda *lines: read_trace(write(tmp_path / "log", *lines))


Read = Callable[..., list[Arrival]]


def test_mooncakes_form_counts_time_from_its_first_request(read: Read) -> None:
    full = Chain((BlockHash(4), BlockHash(5)), 512, 1100)
    assert read(line(), line(timestamp=4000, output_length=0)) == [
        Arrival(0.0, full, 7),
        Arrival(2.5, full, 0),
    ]


def test_a_last_block_that_is_not_full_has_no_hash(read: Read) -> None:
    assert read(line(input_length=1024, hash_ids=[4, 5]))[0].chain.hashes == (4, 5)
    assert read(line(input_length=511, hash_ids=[4]))[0].chain.hashes == ()
    assert read(line(hash_ids=[]))[0].chain == Chain((), 512, 1100)


def test_the_gateways_own_log_comes_in_order_of_ends(read: Read) -> None:
    found = read(
        line(**OWN, timestamp=3000, input_length=40, hash_ids=[2**64 - 1, 8]),
        line(**OWN, timestamp=1000, input_length=16, hash_ids=[3], model="m", cached_tokens=None),
    )
    assert [one.at_seconds for one in found] == [0.0, 2.0]
    assert [one.chain for one in found] == [Chain((3,), 16, 16), Chain((2**64 - 1, 8), 16, 40)]


def test_lines_may_differ_in_block_size(read: Read) -> None:
    found = read(line(block_size=100), line())
    assert [one.chain.block_tokens for one in found] == [100, 512]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress])
def test_archives_are_told_by_their_first_bytes(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(compress(f"{line()}\n\n{line(timestamp=1501)}".encode()))
    assert [one.at_seconds for one in read_trace(path)] == [0.0, pytest.approx(1e-3)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (line(timestamp=None), "timestamp must be a number"),
        (line(timestamp=True), "timestamp must be a number"),
        (line(timestamp=float("nan")), "timestamp must be a number"),
        (line(timestamp=10**400), "timestamp must be a number"),
        (line(input_length=-1), "input_length must be an integer of at least 1"),
        (line(input_length=0), "input_length must be an integer of at least 1"),
        (line(output_length=-5), "output_length must be an integer of at least 0"),
        (line(output_length=1.5), "output_length must be an integer of at least 0"),
        (line(block_size=0), "block_size must be an integer of at least 1"),
        (line(hash_ids="12"), "hash_ids must be a list of integers"),
        (line(hash_ids=[1, "2"]), "hash_ids must be a list of integers"),
        (line(hash_ids=[1, 2, 3, 4]), "4 hash_ids are too many for 1100 tokens in blocks of 512"),
        (line(timestamp=1499), "not in order of time"),
        ('{"timestamp": 1600}', "input_length must be"),
    ],
)
def test_a_wrong_line_is_named(read: Read, wrong: str, why: str) -> None:
    with pytest.raises(TraceError, match=r"log, line 2: .*") as error:
        read(line(), wrong)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bytes_read", [b"", b"\n \n"])
def test_a_log_without_requests_is_refused(tmp_path: Path, bytes_read: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes_read)
    with pytest.raises(TraceError, match="log: no requests"):
        read_trace(path)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    broken = {
        "cut.xz": lzma.compress(line().encode() * 99)[:-20],
        "cut.gz": gzip.compress(line().encode() * 99)[:-20],
        "bad.gz": gzip.compress(line().encode())[:14] + b"\xff" * 40,
        "binary": b"\xff\xfe\x00",
    }
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TraceError, match=name):
            read_trace(tmp_path / name)
    for name, why in (("none", "No such file"), (".", "directory")):
        with pytest.raises(TraceError, match=why):
            read_trace(tmp_path / name)


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_any_order_of_ends_gives_the_order_of_arrivals(stamps: list[int]) -> None:
    with TemporaryDirectory() as folder:
        lines = (line(**OWN, timestamp=stamp) for stamp in stamps)
        found = [one.at_seconds for one in read_trace(write(Path(folder, "log"), *lines))]
    assert found == [pytest.approx((one - min(stamps)) / 1e3) for one in sorted(stamps)]
