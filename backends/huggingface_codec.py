"""Text to tokens and back by a model's own tokenizer, and its chat template."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.util.user_code import first_line

PROMPTS_KEPT = 1024
"""Newest prompts whose tokens are kept: the rollouts of a group have one prompt."""


class HuggingFaceCodec:
    """Text to tokens and back, by a transformers tokenizer; ``chat``: prompts as messages by its template."""

    def __init__(self, tokenizer: Any, *, chat: bool = False) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._encoded = lru_cache(PROMPTS_KEPT)(partial(tokenizer.encode, add_special_tokens=False))

    @property
    def vocabulary(self) -> dict[str, int]:
        """Numbers of all tokens, by their texts."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, prompt: str) -> tuple[int, ...]:
        if self._chat:
            message = [{"role": "user", "content": prompt}]
            prompt = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(self._encoded(prompt))

    def decode(self, tokens: NDArray[np.int64]) -> str:
        # An array, not a list: transformers would check every number of a list in Python, which doubles the time.
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def load_codec(config: RunConfig) -> HuggingFaceCodec:
    """Load the tokenizer of a run's model, which is a folder. Environments make their prompts themselves.

    Raises ConfigError if it cannot be loaded, its files are not there or know no text (transformers makes up an empty
    one then), it has no end token among the model's embeddings, or its chat template takes no message.
    """
    from transformers import AutoConfig, AutoTokenizer

    model = config.train_table.model
    path = model.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"train.model.path: its tokenizer cannot be loaded: {first_line(error)}") from None
    files = sorted(set(tokenizer.vocab_files_names.values()))
    if not any((Path(path) / name).is_file() for name in files):
        raise ConfigError(f"train.model.path must hold the tokenizer, {' or '.join(files)}, got {path!r}")
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise ConfigError(f"train.model.path must hold a tokenizer that knows text, got {path!r}")
    num_embeddings = AutoConfig.from_pretrained(path).vocab_size
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= num_embeddings:  # beyond: made up by transformers
        raise ConfigError(f"train.model.path must have a tokenizer with an end token (eos_token), got {path!r}")
    chat = model.chat_template and config.environment is None and bool(tokenizer.chat_template)
    codec = HuggingFaceCodec(tokenizer, chat=chat)
    try:
        codec.encode("?")
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"train.model.chat_template must be false, since the template cannot be used: {first_line(error)}"
        ) from None
    return codec
