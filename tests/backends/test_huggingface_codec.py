"""Prompts of instruct models: messages of the user by the tokenizer's chat template, unless the run file says no."""

import pytest
from needs import need

need("transformers", "tokenizers", "tensorboard")

from chat_tokenizers import TEMPLATES, chat_tokenizer  # noqa: E402
from in_memory import config_of, turns_of  # noqa: E402
from refusals import message  # noqa: E402
from transformers import Qwen2Config  # noqa: E402

from backends.huggingface_codec import load_codec  # noqa: E402


def saved(folder, template, end="</s>"):
    """Save a tokenizer, and the configuration of a model that has its words."""
    tokenizer = chat_tokenizer(template, end)
    tokenizer.save_pretrained(folder)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (None, "1+1"),
    ],
)
def test_a_chat_template_is_used_if_there_is_one(tmp_path, name, text):
    tokenizer = saved(tmp_path, *(TEMPLATES[name] if name else (None,)))
    model = {"path": str(tmp_path)}
    assert tokenizer.decode(load_codec(config_of(train={"model": model})).encode("1+1")) == text
    plain = config_of(train={"model": model | {"chat_template": False}})
    for unchanged in (plain, turns_of(train={"model": model, "task": {"name": "calculator"}})):
        assert tokenizer.decode(load_codec(unchanged).encode("1+1")) == "1+1"


def test_a_template_that_takes_no_message_is_named(tmp_path):
    saved(tmp_path, "{{ raise_exception('system first') }}")
    refusal = message(load_codec, config_of(train={"model": {"path": str(tmp_path)}}))
    assert refusal.startswith("train.model.chat_template must be false, since the template cannot be used: ")
    assert "system first" in refusal
