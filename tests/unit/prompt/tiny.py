"""A tokenizer and a chat template as a model's folder has them, small enough to check by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

BOS, BEGIN, END = 256, 257, 258
"""Ids behind those of the 256 bytes, each of which is a token of its own."""

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return made


def model_folder(folder: Path, **config: Any) -> Path:
    """A folder with `tokenizer.json`, and `tokenizer_config.json` of these keys."""
    folder.mkdir(exist_ok=True)
    made = tokenizer()
    made.enable_truncation(4)  # as some models' files say; the engine does not do it
    made.enable_padding(length=32)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
