"""What is checked before anything starts: each fault is one line that names key, value and what is allowed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from backends.metrics_log import check_logging
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.rl.tasks import Task

NEEDED = {"torch": "torch", "vllm": "vLLM", "deepspeed": "DeepSpeed", "ray": "Ray", "transformers": "transformers"}
"""Packages of a real run: what they are imported as, and what they are called."""


class HuggingFaceCodec:
    """Text to tokens and back, by a model's own tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

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
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; nothing may wait for a network
    longest = train.task.max_prompt_tokens + config.workload.length.max
    if train.trainer.pack_tokens < longest:
        raise ConfigError(
            "train.trainer.pack_tokens must hold the longest rollout, train.task.max_prompt_tokens + "
            f"workload.length.max = {longest} tokens, got pack_tokens={train.trainer.pack_tokens}"
        )
    if config.scheduler.partial_rollouts:
        raise ConfigError(
            "scheduler.partial_rollouts is for the simulator: train's engines lose what is in progress when they give "
            "their memory to the trainer, got true"
        )
    if train.transport == "broadcast" and config.colocated:
        raise ConfigError(
            "train.transport='broadcast' needs engines and trainer on accelerators of their own: NCCL refuses a group "
            f"with two members on one GPU, got scheduler.kind={config.scheduler.kind!r}"
        )
    folder = Path(train.weights_folder)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"train.weights_folder must be a folder that can be written, got {train.weights_folder!r}")
    if train.device == "gpu" and train.trainer.zero_stage == 0:
        raise ConfigError("train.trainer.zero_stage must be at least 1 on device='gpu' (DeepSpeed's bfloat16), got 0")
    if train.device == "gpu" and config.colocated and train.trainer.zero_stage == 1:
        raise ConfigError(
            "train.trainer.zero_stage must be 2 or 3 where engines and trainer share GPUs, since DeepSpeed offloads "
            "no other, got 1"
        )
    model = _check_model(train.model.path)
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and positions < longest:
        raise ConfigError(
            f"train.task.max_prompt_tokens + workload.length.max must be at most the model's {positions} positions, "
            f"got {train.task.max_prompt_tokens} + {config.workload.length.max}"
        )
    if train.device == "cpu" and model.tie_word_embeddings:
        raise ConfigError(
            "train.model.path must hold a model with tie_word_embeddings=false on device='cpu', where vLLM would keep "
            f"the old output layer, got {train.model.path!r}"
        )
    return _tokenizer(train.model.path, num_embeddings=model.vocab_size)


def check_evaluation(config: RunConfig, task: Task) -> None:
    """Check that a task has as many held-out problems as the evaluation asks for.

    Raises:
        ConfigError: If it has fewer.
    """
    assert config.train is not None
    wanted, there = config.train.evaluation.problems, task.num_held_out
    if there is not None and wanted > there:
        raise ConfigError(
            f"train.evaluation.problems must be at most the task's {there} held-out problems, got {wanted}"
        )


def _check_model(path: str) -> Any:
    """Return the configuration of the model in a folder."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"train.model.path must be a folder with a model (config.json), got {path!r}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"train.model.path must hold weights as *.safetensors, got {path!r}")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"train.model.path: its config.json cannot be used: {_first_line(error)}") from None


def _tokenizer(path: str, *, num_embeddings: int) -> HuggingFaceCodec:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"train.model.path: its tokenizer cannot be loaded: {_first_line(error)}") from None
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= num_embeddings:  # beyond: made up by transformers
        raise ConfigError(f"train.model.path must have a tokenizer with an end token (eos_token), got {path!r}")
    return HuggingFaceCodec(tokenizer)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
