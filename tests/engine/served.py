"""What the worker of the exact-token tests is started with, beside the model itself."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

from tests.up_process import MODEL, MODEL_NAME

TEMPLATE = Path(__file__).parent / "tools.jinja"
ALIAS, ADAPTER = "alias", "adapter"
BEGIN = "<|im_start|>"


def vllm_arguments(folder: Path) -> list[str]:
    """Two names, an adapter, a tokenizer that adds a token of its own, and tool calling."""
    return [
        *("--served-model-name", MODEL_NAME, ALIAS),
        *("--tokenizer", str(tokenizer(folder / "tokenizer"))),
        *("--chat-template", str(TEMPLATE)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--enable-lora", "--max-lora-rank", "8", "--max-loras", "1"),
        *("--lora-modules", f"{ADAPTER}={adapter(folder / 'adapter')}"),
        *("--max-model-len", "2048", "--max-num-seqs", "4"),
    ]


def tokenizer(folder: Path) -> Path:
    """The model's tokenizer, but that it puts a token before a text where it is asked to."""
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    made = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    (number,) = [token["id"] for token in made["added_tokens"] if token["content"] == BEGIN]
    first = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, *({"Sequence": {"id": name, "type_id": 0}} for name in "AB")],
        "special_tokens": {BEGIN: {"id": BEGIN, "ids": [number], "tokens": [BEGIN]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    return folder


def adapter(folder: Path) -> Path:
    """A LoRA adapter of rank 8 that changes nothing: its weights are zeros."""
    folder.mkdir()
    size = json.loads((MODEL / "config.json").read_text())["hidden_size"]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(MODEL),
        "r": 8, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{layer}.lora_A.weight": [8, size], f"{layer}.lora_B.weight": [size, 8]}
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(at)
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder
