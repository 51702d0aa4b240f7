"""Which tokenizer reads which model's prompts, and whether it was found equal to the engine's."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from gateway.prompt.memo import holds
from gateway.prompt.reader import Prompts
from gateway.prompt.tokenizer import TokenizerMissing, load_tokenizer
from gateway.prompt.verify import TEXTS, Tokenize, first_mismatch

log = logging.getLogger(__name__)


class TokenizerSource:
    """Loads each model's tokenizer once and verifies it against the first worker that has it.

    ``folder`` and ``chat_template`` are the operator's; without them a model's own folder is used
    if its ``root`` is one. ``modes`` says of each model whether it is ``exact`` or ``bytes``.
    """

    def __init__(self, prompts: Prompts, folder: Path | None, chat_template: Path | None) -> None:
        self._prompts = prompts
        self._folder = folder
        self._chat_template = chat_template
        self.modes: dict[str, str] = {}

    async def prepare(self, models: list[dict[str, Any]], tokenize: Tokenize) -> None:
        """Decide the mode of each model that has none yet; raises what ``tokenize`` raises."""
        for model in models:
            name = model.get("id")
            if not isinstance(name, str) or name in self.modes:
                continue
            if model.get("parent") is not None:
                self._prompts.adapters.add(name)
            problem = await self._try_exact(name, model.get("root"), tokenize)
            if problem is None:
                log.info("model %s: prompts are read as exact tokens", name)
            else:
                log.warning("model %s: prompts are read as bytes: %s", name, problem)
            self.modes[name] = "exact" if problem is None else "bytes"

    async def _try_exact(self, name: str, root: object, tokenize: Tokenize) -> str | None:
        """Why the model is not read exactly; None if it is now."""
        folder = self._folder
        if folder is None and isinstance(root, str):
            folder = Path(root)
        if folder is None or not await asyncio.to_thread(folder.is_dir):
            return "no tokenizer (name one with --tokenizer)"
        try:
            local = await asyncio.to_thread(load_tokenizer, folder, self._chat_template)
        except TokenizerMissing as error:
            return str(error)
        mismatch = await first_mismatch(name, local, tokenize)
        if mismatch is not None:
            return f"token ids differ from the engine's on the probe {mismatch!r}"
        by_pieces = await asyncio.to_thread(holds, local, list(TEXTS.values()))
        self._prompts.use_exact(name, local, by_pieces)
        return None


def fetch_tokenizer(name: str) -> Path:
    """The folder of a tokenizer: the name itself if it is one, else the hub id's files, downloaded.

    Raises TokenizerMissing.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["tokenizer*.json", "special_tokens_map.json", "chat_template*"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TokenizerMissing(f"tokenizer {name!r}: no such folder, and {error}") from error
