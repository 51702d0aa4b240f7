"""Now and then a real request's token ids against the worker's, beside the requests themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from gateway.core.blocks import token_bytes
from gateway.prompt.anthropic import as_chat
from gateway.prompt.reader import Prompts, Sample
from gateway.prompt.verify import Tokenize, tokenize_body

log = logging.getLogger(__name__)


class Sampler:
    """Compares one request of each model every ``seconds``. ``worker_of(model)`` gives the
    ``/tokenize`` of a ready worker, None if there is none."""

    def __init__(
        self, prompts: Prompts, worker_of: Callable[[str], Tokenize | None], seconds: float
    ) -> None:
        self._prompts = prompts
        self._worker_of = worker_of
        self._seconds = seconds

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self.check_all()
            except Exception:
                log.exception("comparing token ids failed; it goes on")

    async def check_all(self) -> None:
        """Compare what was kept since the last call, and have the next requests kept."""
        for name in self._prompts.exact_names():
            sample = self._prompts.take_sample(name)
            tokenize = self._worker_of(name)
            if sample is not None and tokenize is not None:
                await self._check(sample, tokenize)

    async def _check(self, sample: Sample, tokenize: Tokenize) -> None:
        body = _body(sample)
        ids = await tokenize(body)
        if ids is None or token_bytes(ids) == sample.ids:
            return
        # A template may write the date, and midnight may have passed: both are read once more.
        again = await self._prompts.read(sample.kind.endpoint, sample.fields)
        ids = await tokenize(body)
        if ids is None or again.prompt is None or token_bytes(ids) == again.prompt.data:
            return
        self._prompts.answered(again, len(ids))


def _body(sample: Sample) -> dict[str, Any]:
    fields = sample.fields
    match sample.kind.endpoint:
        case "completions":
            prompt = fields["prompt"]
            special = fields.get("add_special_tokens", True) is not False
            text = prompt if isinstance(prompt, str) else prompt[0]
            return {"model": sample.model, "prompt": text, "add_special_tokens": special}
        case "messages":
            return tokenize_body(sample.model, as_chat(fields))
        case _:
            return tokenize_body(sample.model, fields)
