from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.core.engine_cache import (
    CPU,
    GPU,
    OTHER,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    OtherCache,
)
from gateway.workers.kv_wire import Undecodable, decode
from tests.fake_worker.kv_events import CLEARED, removed, stored

BIG = 2**64 - 5
IDS = list(range(12))


def events(*told: Any) -> list[Event]:
    batch = decode(7, msgspec.msgpack.encode([12.5, list(told), 0]))
    assert (batch.number, batch.at) == (7, 12.5)
    return list(batch.events)


def test_what_vllm_writes_is_read() -> None:
    assert events(stored([1, BIG], 9, IDS[:8], 4), removed([BIG]), CLEARED) == [
        BlocksStored([1, BIG], 9, IDS[:8], 4),
        BlocksRemoved([BIG]),
        AllCleared(),
    ]


def test_hashes_of_bytes_are_their_last_eight() -> None:
    whole = bytes(24) + BIG.to_bytes(8, "big")
    told = events(stored([whole], whole, IDS[:4], 4), removed([whole]))
    assert told == [BlocksStored([BIG], BIG, IDS[:4], 4), BlocksRemoved([BIG])]


def test_removals_are_joined_but_not_over_tiers() -> None:
    told = [removed([1]), removed([2]), removed([3], "CPU"), removed([4], None), CLEARED]
    assert events(*told) == [
        BlocksRemoved([1, 2]), BlocksRemoved([3], CPU), BlocksRemoved([4]), AllCleared(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("medium", "tier"), [(None, GPU), ("GPU", GPU), ("CPU", CPU), ("cpu", CPU), ("STORAGE", OTHER)]
)
def test_tiers(medium: str | None, tier: str) -> None:
    [event] = events(stored([1], None, [], 0, medium=medium))
    assert isinstance(event, BlocksStored) and event.tier == tier


@pytest.mark.parametrize(
    ("fields", "lora", "salt", "opaque"),
    [
        ({}, None, None, False),
        ({"extra_keys": [None, None, None]}, None, None, False),
        ({"extra_keys": [["me"], None, None]}, None, "me", False),
        ({"lora_id": 1, "lora_name": "sql", "extra_keys": [["sql"]] * 3}, "sql", None, False),
        (
            {"lora_id": 1, "lora_name": "sql", "extra_keys": [["sql", "me"], ["sql"], ["sql"]]},
            "sql", "me", False,
        ),
        ({"lora_id": 1}, None, None, True),
        ({"extra_keys": [[["image", 0]], None, None]}, None, None, True),
        ({"extra_keys": [[b"digest"], None, None]}, None, None, True),
    ],
)  # fmt: skip
def test_adapter_and_salt(
    fields: dict[str, Any], lora: str | None, salt: str | None, opaque: bool
) -> None:
    [event] = events(stored([1, 2, 3], None, IDS, 4, **fields))
    assert event == BlocksStored([1, 2, 3], None, IDS, 4, GPU, lora, salt, opaque)


def test_blocks_before_an_image_are_plain() -> None:
    first, rest = events(stored([1, 2, 3], None, IDS, 4, extra_keys=[["me"], [["image", 2]], None]))
    assert first == BlocksStored([1], None, IDS[:4], 4, salt="me")
    assert rest == BlocksStored([2, 3], None, IDS[4:], 4, salt="me", opaque=True)


def test_a_salt_stands_in_a_prompts_first_block_only() -> None:
    [event] = events(stored([1], 9, IDS[:4], 4, extra_keys=[["me"]]))
    assert isinstance(event, BlocksStored) and event.opaque


def test_other_groups_are_another_cache() -> None:
    told = events(stored([1], None, IDS[:4], 4, group_idx=1), removed([1], group_idx=1))
    assert told == [OtherCache(), OtherCache()]
    assert events(removed([1], group_idx=0)) == [BlocksRemoved([1])]


def test_what_is_not_known_is_passed_over() -> None:
    new = {"type": "BlockMoved", "from": 1}
    told = events(new, stored([1], None, IDS[:4], 4, shape="round"), new, CLEARED)
    assert told == [BlocksStored([1], None, IDS[:4], 4), AllCleared()]
    assert decode(0, msgspec.msgpack.encode([1.0, [], None, "more"])).events == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [1]]]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "no"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "New"}, {"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([1.0, [{"block_hashes": [1]}]]),
    ],
)
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(Undecodable):
        decode(0, payload)
