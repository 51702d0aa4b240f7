"""vLLM's batches of KV events, read into the core's. The source is `vllm/distributed/kv_events.py`.

Lenient: fields and kinds of event that are not known are passed over. Block hashes come as integers
or, with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0, as bytes, of which the last eight are that integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

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
from gateway.core.event_order import Batch

_TIERS = {None: GPU, "GPU": GPU, "gpu": GPU, "CPU": CPU, "cpu": CPU}
_OUR_GROUPS = (None, 0)

Hash = int | bytes


class Undecodable(Exception):
    """The bytes are no batch of events, or what a known event says is not understood."""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


_Known = _Stored | _Removed | _Cleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Known]


class _LooseBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


class _Kind(msgspec.Struct):
    type: str


_batch = msgspec.msgpack.Decoder(_Batch)
_loose_batch = msgspec.msgpack.Decoder(_LooseBatch)
_event = msgspec.msgpack.Decoder(_Known)
_kind = msgspec.msgpack.Decoder(_Kind)
_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def decode(number: int, payload: bytes) -> Batch:
    """Raises Undecodable."""
    try:
        try:
            batch = _batch.decode(payload)
        except msgspec.ValidationError:  # an event of another kind, perhaps
            loose = _loose_batch.decode(payload)
            known = [event for raw in loose.events if (event := _one(raw)) is not None]
            batch = _Batch(loose.ts, known)
    except msgspec.DecodeError as error:
        raise Undecodable(str(error)) from error
    return Batch(number, batch.ts, _events(batch.events))


def _one(raw: msgspec.Raw) -> _Known | None:
    """None for an event of an unknown kind."""
    return _event.decode(raw) if _kind.decode(raw).type in _KINDS else None


def _events(told: Sequence[_Known]) -> list[Event]:
    """Removals are told one by one: those that follow each other are joined."""
    events: list[Event] = []
    for event in told:
        if isinstance(event, _Cleared):
            events.append(AllCleared())
        elif event.group_idx not in _OUR_GROUPS:
            events.append(OtherCache())
        elif isinstance(event, _Stored):
            events += _stored(event)
        else:
            tier, hashes = _tier(event.medium), _numbers(event.block_hashes)
            last = events[-1] if events else None
            if isinstance(last, BlocksRemoved) and last.tier == tier:
                last.hashes.extend(hashes)
            else:
                events.append(BlocksRemoved(hashes, tier))
    return events


def _stored(event: _Stored) -> Sequence[BlocksStored]:
    """One event, or two where more than tokens went into its later blocks (an image)."""
    hashes = _numbers(event.block_hashes)
    parent = None if event.parent_block_hash is None else _number(event.parent_block_hash)
    salt, plain = _extra(event, len(hashes))
    size, tokens = event.block_size, event.token_ids
    whole = BlocksStored(hashes, parent, tokens, size, _tier(event.medium), event.lora_name, salt)
    if plain == len(hashes):
        return (whole,)
    if plain == 0 or len(tokens) != size * len(hashes):
        return (whole._replace(opaque=True),)
    return (
        whole._replace(hashes=hashes[:plain], token_ids=tokens[: plain * size]),
        whole._replace(hashes=hashes[plain:], token_ids=tokens[plain * size :], opaque=True),
    )


def _extra(event: _Stored, blocks: int) -> tuple[str | None, int]:
    """The cache salt, and how many leading blocks hold nothing but tokens, adapter and salt. vLLM
    lists for each block the adapter's name, images, the salt (in a prompt's first block), digests.
    """
    if event.lora_id is not None and event.lora_name is None:
        return None, 0
    if event.extra_keys is None or not any(event.extra_keys):
        return None, blocks
    salt = None
    named = [event.lora_name] if event.lora_name is not None else []
    for number, keys in enumerate(event.extra_keys):
        if not keys or keys == named:
            continue
        rest = keys[1:] if named and keys[:1] == named else keys
        first = number == 0 and event.parent_block_hash is None
        if not first or len(rest) != 1 or not isinstance(rest[0], str):
            return salt, number
        salt = rest[0]
    return salt, blocks


def _tier(medium: str | None) -> str:
    return _TIERS.get(medium, OTHER)


def _numbers(hashes: list[Hash]) -> list[int]:
    # An engine writes all of them in one way.
    if hashes and isinstance(hashes[0], bytes):
        return [_number(each) for each in hashes]
    return cast(list[int], hashes)


def _number(told: Hash) -> int:
    return told if isinstance(told, int) else int.from_bytes(told[-8:], "big")
