"""Token ids of text seen before, so that only new text is tokenised.

Long prompts share most of their text: a document asked about again, a conversation with one more
turn. Text is cut into pieces at *seams*, places where a tokenizer of words never looks across: a
space between two ASCII letters begins a pre-token whatever stands before it. The ids of a piece
then depend on the piece alone, and joining them gives the ids of the whole. Whether that holds for
a tokenizer is tried before it is relied on (``holds``).
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from functools import partial
from secrets import randbits

from xxhash import xxh3_128_digest

from gateway.prompt.batches import Batches
from gateway.prompt.tokenizer import ModelTokenizer

PIECE_CHARS = 2048
"""Pieces end at the first seam behind so many characters."""

MEMO_BYTES = 256 << 20
"""Bound of all remembered ids (four bytes each) and keys."""

_ENTRY_BYTES = 200
_ACROSS = re.compile(r"[A-Za-z][ \u0120\u2581]")
"""A token of the vocabulary that goes on behind a word; spaces as tokenizers write them."""

_SEAM = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")


def pieces(text: str) -> list[str]:
    """``text`` cut at seams; joined they are the text. Equal beginnings give equal first pieces."""
    cut: list[str] = []
    start = 0
    while len(text) - start > PIECE_CHARS:
        seam = _SEAM.search(text, start + PIECE_CHARS)
        if seam is None:
            break
        cut.append(text[start : seam.start()])
        start = seam.start()
    cut.append(text[start:])
    return cut


def holds(tokenizer: ModelTokenizer, texts: list[str]) -> bool:
    """Whether joining the ids of pieces gives the ids of the whole, tried at every seam."""
    if any(_ACROSS.search(token) for token in tokenizer.tokenizer.get_vocab()):
        return False
    for token in tokenizer.tokenizer.get_added_tokens_decoder().values():
        # A seam inside of a special token, or beside one that swallows spaces, is none.
        if (
            _SEAM.search(token.content)
            or token.content[:1].isalpha()
            or token.content[-1:].isalpha()
        ):
            return False
    for text in texts:
        whole = tokenizer.encode(text, False)
        for seam in _SEAM.finditer(text):
            left, right = text[: seam.start()], text[seam.start() :]
            if tokenizer.encode(left, False) + tokenizer.encode(right, False) != whole:
                return False
    return True


class Memo:
    """The ids of one model's texts by pieces, the least recently used forgotten first.

    Keys are digests: the text itself is not kept. A piece that is being tokenised for one prompt is
    waited for by all others that have it.
    """

    def __init__(self, tokenizer: ModelTokenizer, batches: Batches, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._batches = batches
        self._max_bytes = max_bytes
        # Drawn anew, so that nobody can write a text that is taken for another one.
        self._seed = randbits(64)
        self.held_bytes = 0
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self._coming: dict[bytes, tuple[asyncio.Future[list[bytes]], int]] = {}
        self._before, self._behind = tokenizer.around()

    async def encode(self, text: str, special: bool) -> bytes:
        """The ids of the whole text as ``token_bytes``; only its new pieces are tokenised."""
        parts = pieces(text)
        keys = [xxh3_128_digest(part.encode(), self._seed) for part in parts]
        found = [self._recall(key) for key in keys]
        missing = {
            key: part
            for key, part, ids in zip(keys, parts, found, strict=True)
            if ids is None and key not in self._coming
        }
        if missing:
            self._fetch(missing)
        # Looked up before anything is awaited: what arrives leaves the table.
        coming = {i: self._coming[keys[i]] for i, ids in enumerate(found) if ids is None}
        for i, (future, place) in coming.items():
            found[i] = (await asyncio.shield(future))[place]
        joined = b"".join(ids for ids in found if ids is not None)
        return self._before + joined + self._behind if special else joined

    def _fetch(self, missing: dict[bytes, str]) -> None:
        """One task that no client's leaving can cancel: others may wait for the same pieces."""
        future = self._batches.submit(self._tokenizer, list(missing.values()), False)
        for place, key in enumerate(missing):
            self._coming[key] = (future, place)
        future.add_done_callback(partial(self._arrived, list(missing)))

    def _arrived(self, keys: list[bytes], future: asyncio.Future[list[bytes]]) -> None:
        for key in keys:
            del self._coming[key]
        if future.cancelled() or future.exception() is not None:
            return
        for key, ids in zip(keys, future.result(), strict=True):
            self._keep(key, ids)

    def _recall(self, key: bytes) -> bytes | None:
        ids = self._ids.get(key)
        if ids is not None:
            self._ids.move_to_end(key)
        return ids

    def _keep(self, key: bytes, ids: bytes) -> None:
        self._ids[key] = ids
        self.held_bytes += len(ids) + _ENTRY_BYTES
        while self.held_bytes > self._max_bytes:
            _, old = self._ids.popitem(last=False)
            self.held_bytes -= len(old) + _ENTRY_BYTES
