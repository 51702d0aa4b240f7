"""Tokenising off the event loop: a few threads that take what waits, a little at a time.

A burst of prompts handed to threads one by one would cost each of them a fight for the interpreter
lock with the busy event loop; in one big batch the last would hold up the first.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from gateway.core.blocks import token_bytes
from gateway.prompt.tokenizer import ModelTokenizer

BATCH_CHARS = 32 * 1024
"""Text that a thread takes at once: some 10 ms of work."""

MOST_THREADS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    tokenizer: ModelTokenizer
    texts: list[str]
    special: bool
    done: asyncio.Future[list[bytes]]


class Batches:
    """Owns the threads and the queue in front of them; first come, first served."""

    def __init__(self) -> None:
        self._free = min(MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        self._threads = ThreadPoolExecutor(self._free, thread_name_prefix="tokenize")
        self._waiting: deque[_Waiting] = deque()

    def submit(
        self, tokenizer: ModelTokenizer, texts: list[str], special: bool
    ) -> asyncio.Future[list[bytes]]:
        """The ids of each text as ``token_bytes`` gives them; fails as the tokenizer fails."""
        done: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(tokenizer, texts, special, done))
        self._start()
        return done

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while self._free and self._waiting:
            batch: list[_Waiting] = []
            size = 0
            while self._waiting and size < BATCH_CHARS:
                batch.append(self._waiting.popleft())
                size += sum(map(len, batch[-1].texts))
            self._free -= 1
            work = asyncio.get_running_loop().run_in_executor(self._threads, _encode, batch)
            work.add_done_callback(partial(self._finished, batch))

    def _finished(self, batch: list[_Waiting], result: asyncio.Future[list[list[bytes]]]) -> None:
        self._free += 1
        if not result.cancelled():
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
