"""What routing learns of each request's prompt, exactly where it can, else by its bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway.core.blocks import Prompt, extra_key, token_bytes
from gateway.prompt.anthropic import read_messages
from gateway.prompt.batches import Batches
from gateway.prompt.canonical import canonical
from gateway.prompt.chat_template import TemplateFailed
from gateway.prompt.conversation import Conversation, NotExact, read_conversation
from gateway.prompt.memo import MEMO_BYTES, Memo
from gateway.prompt.responses import read_responses
from gateway.prompt.tokenizer import ModelTokenizer
from gateway.prompt.trust import Kind, Trust

log = logging.getLogger(__name__)

_INLINE_CHARS = 1024
"""Text up to this is tokenised on the event loop (under 0.5 ms); a thread costs more than that."""

_COUNTED_CHARS = 64 * 1024
"""Of several texts in one body the first is routed by; the others are only counted, up to this."""

_CHANGES_TEXT = ("truncate_prompt_tokens", "prompt_embeds", "suffix")

_CONVERSATIONS: dict[str, Callable[[dict[str, Any], bool], Conversation]] = {
    "chat": read_conversation,
    "messages": read_messages,
    "responses": read_responses,
}


@dataclass(slots=True, eq=False)
class ExactModel:
    """What reads the prompts of one base model, under all its names and those of its adapters.

    ``by_pieces``: the ids of its text may be joined from those of its pieces. ``drops_tools``: the
    worker leaves tools out where ``tool_choice`` is none.
    """

    tokenizer: ModelTokenizer
    trust: Trust
    by_pieces: bool = False
    drops_tools: bool = False
    memo: Memo | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of one request. ``fallback``: why not exactly, None if it was.

    An exact one has its ``kind`` and the tokens of all prompts in the body, None where they were
    not all counted.
    """

    prompt: Prompt | None
    fallback: str | None
    model: str | None = None
    kind: Kind | None = None
    tokens: int | None = None


UNREAD = Reading(None, "unparsed")


@dataclass(frozen=True, slots=True)
class Sample:
    """A request whose ids a worker can be asked for."""

    model: str
    kind: Kind
    fields: dict[str, Any]
    ids: bytes


class Prompts:
    """Reads prompts; exact for a model once its tokenizer was verified against the engine."""

    def __init__(self) -> None:
        self._exact: dict[str, ExactModel] = {}
        self._base: set[str] = set()
        self._batches = Batches()
        self._wanted: set[str] = set()
        self._samples: dict[str, Sample] = {}

    def use_exact(self, name: str, model: ExactModel) -> None:
        if model.by_pieces and model.memo is None:
            model.memo = Memo(model.tokenizer, self._batches, MEMO_BYTES)
        self._exact[name] = model

    def is_base(self, name: str) -> None:
        """This name is no adapter's: the engine's cache knows its model by no name."""
        self._base.add(name)

    def close(self) -> None:
        self._batches.close()

    async def read(self, endpoint: str, fields: dict[str, Any]) -> Reading:
        """Never raises for a request's content."""
        name = fields.get("model")
        if not isinstance(name, str):
            name = None
        extra = self._extra(name, fields.get("cache_salt"))
        try:
            ids, kind, tokens = await self._tokens(endpoint, name, fields)
        except NotExact as error:
            data = canonical(endpoint, fields)
            if data is None:
                return Reading(None, "no_prompt", name)
            return Reading(Prompt(data, False, extra), error.reason, name)
        if self._wanted and name in self._wanted and _can_be_asked(kind, ids):
            self._wanted.discard(name)
            self._samples[name] = Sample(name, kind, fields, ids)
        return Reading(Prompt(ids, True, extra), None, name, kind, tokens)

    def answered(self, reading: Reading, prompt_tokens: int) -> None:
        """The engine counted so many prompt tokens, and not those that were read."""
        if reading.kind is None or reading.model not in self._exact:
            return
        switched = self._exact[reading.model].trust.mismatched(reading.kind)
        if switched is not None:
            log.warning(
                "model %s: %s are read as bytes from now on: the engine counts %d prompt tokens,"
                " the gateway %s",
                *(reading.model, switched, prompt_tokens, reading.tokens),
            )

    def exact_names(self) -> list[str]:
        return [name for name, model in self._exact.items() if model.trust.exact]

    def take_sample(self, name: str) -> Sample | None:
        """The request kept since the last call, if one came; the next that comes is kept."""
        self._wanted.add(name)
        return self._samples.pop(name, None)

    def _extra(self, name: str | None, salt: object) -> bytes:
        """What separates equal tokens in the engine's cache: an adapter, and a cache salt."""
        adapter = None if name is None or name in self._base else name
        return extra_key(adapter, salt if isinstance(salt, str) and salt else None)

    async def _tokens(
        self, endpoint: str, name: str | None, fields: dict[str, Any]
    ) -> tuple[bytes, Kind, int | None]:
        """Ids of the prompt, its kind, and the tokens of all prompts; raises NotExact."""
        if endpoint == "completions":
            if any(fields.get(option) is not None for option in _CHANGES_TEXT):
                raise NotExact("option" if fields.get("prompt") else "no_prompt")
            if (found := _token_ids(fields.get("prompt"))) is not None:
                return found[0], _IDS, found[1]
        model = self._exact.get(name) if name is not None else None
        if model is None:
            raise NotExact("no_tokenizer")
        if not model.trust.exact:
            raise NotExact("mismatch")
        if endpoint == "completions":
            return await self._texts(model, fields)
        conversation = _CONVERSATIONS[endpoint](fields, model.drops_tools)
        kind = Kind(endpoint, conversation.features)
        if not model.trust.admits(kind):
            raise NotExact("mismatch")
        try:
            text = model.tokenizer.render(conversation)
        except TemplateFailed:
            raise NotExact("template") from None
        ids = await self._encode(model, text, conversation.special)
        return ids, kind, len(ids) // 4

    async def _texts(
        self, model: ExactModel, fields: dict[str, Any]
    ) -> tuple[bytes, Kind, int | None]:
        prompt = fields.get("prompt")
        texts: list[Any] = prompt if isinstance(prompt, list) and prompt else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise NotExact("not_text")
        special = fields.get("add_special_tokens", True) is not False
        first = await self._encode(model, texts[0], special)
        if len(texts) == 1:
            return first, _TEXT, len(first) // 4
        if sum(map(len, texts)) > _COUNTED_CHARS:
            return first, _TEXT, None
        others = await self._batches.submit(model.tokenizer, texts[1:], special)
        return first, _TEXT, (len(first) + sum(map(len, others))) // 4

    async def _encode(self, model: ExactModel, text: str, special: bool) -> bytes:
        try:
            if len(text) <= _INLINE_CHARS:
                return token_bytes(model.tokenizer.encode(text, special))
            if model.memo is not None:
                return await model.memo.encode(text, special)
            return (await self._batches.submit(model.tokenizer, [text], special))[0]
        except UnicodeError:  # a lone surrogate
            raise NotExact("not_text") from None


_TEXT, _IDS = Kind("completions"), Kind("completions", frozenset(("ids",)))


_MOST_SAMPLE_BYTES = 4 * 32 * 1024


def _can_be_asked(kind: Kind, ids: bytes) -> bool:
    """Whether ``/tokenize`` takes all that makes these ids, and they are not too many to ask for
    at the side."""
    takes = kind.endpoint != "responses" and kind is not _IDS
    return takes and "no_tool_choice" not in kind.features and len(ids) <= _MOST_SAMPLE_BYTES


def _token_ids(prompt: object) -> tuple[bytes, int] | None:
    """Ids of a prompt given as token ids, or of the first of several, and the number of all; None
    if it is something else."""
    if not isinstance(prompt, list) or not prompt:
        return None
    several: list[Any] = prompt if isinstance(prompt[0], list) else [prompt]
    first = several[0]
    if not first or not isinstance(first[0], int):
        return None
    try:
        ids = token_bytes(first)
    except (TypeError, OverflowError):
        return None
    return ids, sum(len(one) for one in several if isinstance(one, list))
