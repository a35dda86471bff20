"""What is checked before anything starts: each fault is one line that names key, value and what is allowed."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.metricslog import check_logging
from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError

NEEDED = {"torch": "torch", "vllm": "vLLM", "deepspeed": "DeepSpeed", "ray": "Ray", "transformers": "transformers"}
"""Packages of a real run: what they are imported as, and what they are called."""


class HuggingFaceCodec:
    """Text to tokens and back, by a model's own tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_tokens = len(tokenizer)

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, without any that the tokenizer would add."""
        return tuple(self._tokenizer.encode(prompt, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        """Return the text of an answer, without the end token."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def check(config: RunConfig) -> HuggingFaceCodec:
    """Check that a run can begin, as far as one can tell without starting it.

    Args:
        config: What is to be run.

    Returns:
        The model's tokenizer.

    Raises:
        ConfigError: If a package is missing, the model cannot be used, or something does not fit.
    """
    train = config.train
    if train is None:
        raise ConfigError("train is missing; pipelinerl train needs the table [train]: model, task, optimizer")
    missing = [name for package, name in NEEDED.items() if find_spec(package) is None]
    if missing:
        extra = f"train-{train.device}"
        raise ConfigError(f"train needs {', '.join(missing)}, not installed: pip install 'pipelinerl[{extra}]'")
    check_logging(config)
    longest = train.task.max_prompt_tokens + config.workload.length.max
    if train.trainer.pack_tokens < longest:
        raise ConfigError(
            "train.trainer.pack_tokens must hold the longest rollout, train.task.max_prompt_tokens + "
            f"workload.length.max = {longest} tokens, got pack_tokens={train.trainer.pack_tokens}"
        )
    if train.transport == "nccl" and (train.device == "cpu" or config.colocated):
        raise ConfigError(
            "train.transport='nccl' needs train.device='gpu' and scheduler.kind='pipeline', got "
            f"device={train.device!r}, kind={config.scheduler.kind!r}"
        )
    folder = Path(train.weights_folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"train.weights_folder must be a folder that can be written, got {train.weights_folder!r}")
    positions = _check_model(Path(train.model.path))
    if positions is not None and positions < longest:
        raise ConfigError(
            f"train.task.max_prompt_tokens + workload.length.max must be at most the model's {positions} positions, "
            f"got {train.task.max_prompt_tokens} + {config.workload.length.max}"
        )
    if train.device == "cpu" and _is_tied(Path(train.model.path)):
        raise ConfigError(
            "train.model.path must hold a model with tie_word_embeddings=false on device='cpu', where vLLM would keep "
            f"the old output layer, got {train.model.path!r}"
        )
    return _tokenizer(train.model.path)


def _model_config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return content


def _check_model(folder: Path) -> int | None:
    """Return the positions of the model in a folder, if it says."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"train.model.path must be a folder with a model (config.json), got {str(folder)!r}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"train.model.path must hold weights as *.safetensors, got {str(folder)!r}")
    try:
        positions = _model_config(folder).get("max_position_embeddings")
    except (ValueError, OSError) as error:
        raise ConfigError(f"train.model.path: {folder / 'config.json'} cannot be read: {error}") from None
    return positions


def _is_tied(folder: Path) -> bool:
    # Transformers leaves the key out where the model class's own default holds, and that is tied.
    return bool(_model_config(folder).get("tie_word_embeddings", True))


def _tokenizer(path: str) -> HuggingFaceCodec:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"train.model.path: its tokenizer cannot be loaded: {_first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"train.model.path must have a tokenizer with an end token (eos_token), got {path!r}")
    return HuggingFaceCodec(tokenizer)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
