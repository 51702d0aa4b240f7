"""Tokenising off the event loop: one thread that takes whatever waits, together.

A burst of prompts handed to threads one by one would cost each of them a fight for the interpreter
lock with the busy event loop. Together they cost one, and the tokenizer spreads them over cores.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gateway.core.blocks import token_bytes
from gateway.prompt.tokenizer import ModelTokenizer

BATCH_CHARS = 64 * 1024 * max(2, os.cpu_count() or 1)
"""Text taken at once: some tens of milliseconds, so that nobody waits long for the others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    tokenizer: ModelTokenizer
    texts: list[str]
    special: bool
    done: asyncio.Future[list[bytes]]


class Batches:
    """Owns the thread and the queue in front of it; first come, first served."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._waiting: list[_Waiting] = []
        self._busy = False

    def submit(
        self, tokenizer: ModelTokenizer, texts: list[str], special: bool
    ) -> asyncio.Future[list[bytes]]:
        """The ids of each text as ``token_bytes`` gives them; fails as the tokenizer fails."""
        done: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(tokenizer, texts, special, done))
        if not self._busy:
            self._start()
        return done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._busy = True
        size = taken = 0
        for waiting in self._waiting:
            taken += 1
            size += sum(map(len, waiting.texts))
            if size >= BATCH_CHARS:
                break
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        work = asyncio.get_running_loop().run_in_executor(self._thread, _encode, batch)
        work.add_done_callback(lambda result: self._finished(batch, result))

    def _finished(self, batch: list[_Waiting], result: asyncio.Future[list[list[bytes]]]) -> None:
        self._busy = False
        if self._waiting and not result.cancelled():
            self._start()
        error = None if result.cancelled() else result.exception()
        for place, waiting in enumerate(batch):
            # Who left has cancelled its future.
            if waiting.done.done():
                continue
            if result.cancelled():
                waiting.done.cancel()
            elif error is not None:
                waiting.done.set_exception(error)
            else:
                waiting.done.set_result(result.result()[place])


def _encode(batch: list[_Waiting]) -> list[list[bytes]]:
    """Runs in the thread: one call of the tokenizer for all that share model and mode."""
    alike: dict[tuple[int, bool], list[int]] = {}
    for place, waiting in enumerate(batch):
        alike.setdefault((id(waiting.tokenizer), waiting.special), []).append(place)
    encoded: list[list[bytes]] = [[] for _ in batch]
    for (_, special), places in alike.items():
        texts = [text for place in places for text in batch[place].texts]
        ids = iter(batch[places[0]].tokenizer.encode_all(texts, special))
        for place in places:
            encoded[place] = [token_bytes(next(ids)) for _ in batch[place].texts]
    return encoded
