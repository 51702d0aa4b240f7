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
    text: str
    special: bool
    done: asyncio.Future[bytes]


class Batches:
    """Owns the thread and the queue in front of it; first come, first served."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._waiting: list[_Waiting] = []
        self._busy = False

    async def encode(self, tokenizer: ModelTokenizer, text: str, special: bool) -> bytes:
        """Token ids as ``token_bytes`` gives them; raises what the tokenizer raises."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(tokenizer, text, special, done))
        if not self._busy:
            self._start()
        encoded: bytes = await done
        return encoded

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._busy = True
        size = taken = 0
        for waiting in self._waiting:
            taken += 1
            size += len(waiting.text)
            if size >= BATCH_CHARS:
                break
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        work = asyncio.get_running_loop().run_in_executor(self._thread, _encode, batch)
        work.add_done_callback(lambda result: self._finished(batch, result))

    def _finished(
        self, batch: list[_Waiting], result: asyncio.Future[dict[_Waiting, bytes]]
    ) -> None:
        self._busy = False
        if self._waiting and not result.cancelled():
            self._start()
        for waiting in batch:
            # A client that left has cancelled its future.
            if waiting.done.done():
                continue
            if result.cancelled():
                waiting.done.cancel()
            elif (error := result.exception()) is not None:
                waiting.done.set_exception(error)
            else:
                waiting.done.set_result(result.result()[waiting])


def _encode(batch: list[_Waiting]) -> dict[_Waiting, bytes]:
    """Runs in the thread: one call of the tokenizer for all that share model and mode."""
    alike: dict[tuple[int, bool], list[_Waiting]] = {}
    for waiting in batch:
        alike.setdefault((id(waiting.tokenizer), waiting.special), []).append(waiting)
    encoded = {}
    for group in alike.values():
        first = group[0]
        ids = first.tokenizer.encode_all([w.text for w in group], first.special)
        for waiting, tokens in zip(group, ids, strict=True):
            encoded[waiting] = token_bytes(tokens)
    return encoded
