"""Which tokenizer reads which model's prompts, and whether it was found equal to the engine's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gateway.prompt.memo import holds
from gateway.prompt.reader import ExactModel, Prompts
from gateway.prompt.tokenizer import ModelTokenizer, TokenizerMissing, load_tokenizer
from gateway.prompt.trust import Trust
from gateway.prompt.verify import TEXTS, Tokenize, Verdict, verify

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rendering:
    """What the operator says of the workers' prompts. Without ``folder`` a model's own folder is
    used if its ``root`` is one; ``chat_template`` is a file or the text itself; ``defaults`` are
    template variables that the workers set themselves; ``drops_tools``: they leave tools out where
    ``tool_choice`` is none."""

    folder: Path | None = None
    chat_template: Path | str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    drops_tools: bool = False


class TokenizerSource:
    """Loads each model's tokenizer once and verifies it against the first worker that has it.

    All names of one worker's base model, and its adapters, share one tokenizer and one verdict.
    """

    def __init__(self, prompts: Prompts, rendering: Rendering) -> None:
        self._prompts = prompts
        self._rendering = rendering
        self._models: dict[str, ExactModel | None] = {}
        self._one_at_a_time = asyncio.Lock()

    def modes(self) -> dict[str, str]:
        """Of each model whether it is read as ``exact`` or as ``bytes``."""
        return {
            name: "exact" if model is not None and model.trust.exact else "bytes"
            for name, model in self._models.items()
        }

    def mismatches(self) -> dict[str, int]:
        """Of each model that has a tokenizer how often the engine read a prompt otherwise; its
        names share the count."""
        return {n: m.trust.mismatches for n, m in self._models.items() if m is not None}

    async def prepare(self, models: list[dict[str, Any]], tokenize: Tokenize) -> None:
        """Decide the mode of each model that has none yet; raises what ``tokenize`` raises.

        Workers that start together wait for the first of them, so that a model is verified once.
        """
        async with self._one_at_a_time:
            await self._prepare(models, tokenize)

    async def _prepare(self, models: list[dict[str, Any]], tokenize: Tokenize) -> None:
        named = [model for model in models if isinstance(model.get("id"), str)]
        of_worker: ExactModel | None = None
        for model in sorted(named, key=lambda model: isinstance(model.get("parent"), str)):
            name = model["id"]
            adapter = isinstance(model.get("parent"), str)
            if not adapter:
                self._prompts.is_base(name)
            if name in self._models:
                of_worker = of_worker if adapter else self._models[name]
                continue
            if not adapter and of_worker is None:
                of_worker = await self._try_exact(name, model.get("root"), tokenize)
            self._models[name] = of_worker
            if of_worker is not None:
                self._prompts.use_exact(name, of_worker)
                if of_worker.trust.exact:
                    log.info("model %s: prompts are read as exact tokens", name)

    async def _try_exact(self, name: str, root: object, tokenize: Tokenize) -> ExactModel | None:
        """None if there is no tokenizer; the reason is logged."""
        folder = self._rendering.folder
        if folder is None and isinstance(root, str):
            folder = Path(root)
        if folder is None or not await asyncio.to_thread(folder.is_dir):
            problem = "no tokenizer (name one with --tokenizer)"
            log.warning("model %s: prompts are read as bytes: %s", name, problem)
            return None
        try:
            local = await asyncio.to_thread(self._load, folder)
        except TokenizerMissing as error:
            log.warning("model %s: prompts are read as bytes: %s", name, error)
            return None
        verdict = await verify(name, local, tokenize)
        local = replace(local, content=verdict.content)
        by_pieces = await asyncio.to_thread(holds, local, list(TEXTS.values()))
        trust = Trust()
        _judge(name, verdict, trust)
        return ExactModel(local, trust, by_pieces, self._rendering.drops_tools)

    def _load(self, folder: Path) -> ModelTokenizer:
        local = load_tokenizer(folder, self._rendering.chat_template)
        return replace(local, defaults=self._rendering.defaults)


def _judge(name: str, verdict: Verdict, trust: Trust) -> None:
    """Plain probes that failed speak for all prompts, others for their feature."""
    for feature, probes in verdict.failed.items():
        if feature is None:
            trust.withdraw_all()
        else:
            trust.withdraw(feature)
        log.warning(
            "model %s: %s are read as bytes: token ids differ from the engine's on %s",
            name,
            "prompts" if feature is None else f"prompts with {feature}",
            ", ".join(f"the probe {probe!r}" for probe in probes),
        )


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
