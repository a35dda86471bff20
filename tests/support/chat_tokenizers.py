"""Tokenizers with chat templates, made on the spot: bytes, merged into longer tokens here and there."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As of Qwen2.5."""
LLAMA = """<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
"""As of Llama 3."""
PLAIN = """{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '</s>' if m.role == 'assistant' else '' }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""Roles in words; only answers have an end token."""
FORGETS_REASONING = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As of Qwen3: answers that are history have lost their reasoning."""
TEMPLATES = {"chatml": (CHATML, "<|im_end|>"), "llama": (LLAMA, "<|eot_id|>"), "plain": (PLAIN, "</s>")}
"""Those that keep all they are given, and their end tokens."""
_SPECIAL = ("<|im_end|>", "<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def chat_tokenizer(template: str | None, end: str) -> Any:
    """Return a tokenizer of bytes and some longer tokens, with a chat template and an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*_SPECIAL, "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["station satin tin nation stations assistant user tool " * 4], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, chat_template=template)
