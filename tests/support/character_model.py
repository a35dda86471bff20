"""An untrained model with a tokenizer of characters, for tests of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_model(folder: Path, *, seed: int = 0, end_token: str | None = None, tied: bool = False) -> Any:
    """Write an untrained Qwen2 of 82 496 parameters with a tokenizer of characters; return it."""
    import tokenizers
    import torch
    import transformers
    from tiny_model import SHAPE

    torch.manual_seed(seed)
    dropout = 0.5  # would show if a trainer left it on
    shape = transformers.Qwen2Config(**SHAPE, tie_word_embeddings=tied, attention_dropout=dropout)
    model = transformers.Qwen2ForCausalLM(shape).eval()
    words = ["<pad>", "<eos>", *"0123456789+-*=?abcdefghijklmnopqrstuvwxyz .,:"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end_token).save_pretrained(folder)
    model.save_pretrained(folder)
    return model
