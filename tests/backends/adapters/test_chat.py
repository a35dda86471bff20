"""Messages to tokens, as a property over templates and over ways to write the same text in tokens."""

import json
from typing import Any

import pytest
from chat_tokenizers import CHATML, FORGETS_REASONING, TEMPLATES, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import message

from backends.adapters.chat import ChatTokens, load_tokenizer

TOKENIZERS = {name: chat_tokenizer(template, end) for name, (template, end) in TEMPLATES.items()}
WORDS = st.text(st.sampled_from("aeinst .,\n{}<>"), min_size=1, max_size=12).filter(lambda text: text == text.strip())
OBSERVED = st.tuples(st.sampled_from(["user", "tool"]), WORDS)


def spelled(tokenizer: Any, text: str, cuts: list[bool]) -> list[int]:
    """Return tokens that spell a text, cut here and there where the tokenizer itself would not cut it."""
    pieces, start = [], 0
    for place, cut in enumerate(cuts[: len(text) - 1], start=1):
        if cut:
            pieces.append(text[start:place])
            start = place
    return [one for piece in [*pieces, text[start:]] for one in tokenizer.encode(piece, add_special_tokens=False)]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(st.tuples(WORDS, OBSERVED, st.lists(st.booleans(), max_size=11), st.booleans()), max_size=4),
    prompt=WORDS,
)
def test_a_conversation_is_the_text_of_its_template_however_its_answers_are_spelled(
    name: str, turns: list[Any], prompt: str
) -> None:
    tokenizer, chat = TOKENIZERS[name], ChatTokens(TOKENIZERS[name])
    messages = [{"role": "user", "content": prompt}]
    tokens = list(chat.prompt(messages))
    for answer, (role, content), cuts, ended in turns:
        generated = spelled(tokenizer, answer, cuts) + [tokenizer.eos_token_id] * ended
        assert chat.text(generated) == answer
        new = [{"role": role, "content": content}]
        tokens += [*generated, *chat.after(generated, new)]
        messages += [{"role": "assistant", "content": answer}, *new]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == whole


def test_the_ways_to_spell_an_answer_differ() -> None:
    """The property above has something to show: the same text, made into tokens again, would be others."""
    tokenizer = TOKENIZERS["chatml"]
    assert spelled(tokenizer, "station", [True] * 6) != tokenizer.encode("station", add_special_tokens=False)


HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("name", "ended", "cut"),
    [
        ("chatml", "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        ("llama", f"{HEADER.format('tool')}4<|eot_id|>{HEADER.format('assistant')}", "<|eot_id|>"),
        ("plain", "\ntool: 4\nassistant: ", "</s>"),
    ],
)
def test_what_follows_an_answer(name: str, ended: str, cut: str) -> None:
    tokenizer, chat = TOKENIZERS[name], ChatTokens(TOKENIZERS[name])
    new = [{"role": "tool", "content": "4"}]
    answer = tokenizer.encode("2+2", add_special_tokens=False)
    assert tokenizer.decode(chat.after([*answer, tokenizer.eos_token_id], new)) == ended
    assert tokenizer.decode(chat.after(answer, new)) == cut + ended


def test_reasoning_that_a_template_forgets_stays() -> None:
    """Its whole conversation, written by the template, would have lost what was sampled; and the end of it moves."""
    tokenizer = chat_tokenizer(FORGETS_REASONING, "<|im_end|>")
    chat = ChatTokens(tokenizer)
    answer = tokenizer.encode("<think>hm</think>four<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(chat.after(answer, [{"role": "user", "content": "sure?"}])) == (
        "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_are_in_the_prompt() -> None:
    schema = {"type": "function", "function": {"name": "add", "parameters": {}}}
    chat = ChatTokens(TOKENIZERS["chatml"], tools=[schema])
    text = TOKENIZERS["chatml"].decode(chat.prompt([{"role": "user", "content": "2+2?"}]))
    assert json.dumps(schema) in text
    assert text.endswith("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "must have a chat template"),
        ("{{ raise_exception('no users') }}", "its chat template cannot be used: no users"),
        ("{% for m in messages if m.role == 'user' %}{{ m }}{% endfor %}", "it leaves answers of the model out"),
    ],
)
def test_a_tokenizer_without_a_usable_template_is_one_line(template: str | None, words: str) -> None:
    assert words in message(ChatTokens, chat_tokenizer(template, "<|im_end|>"))


def test_a_tokenizer_is_loaded_from_a_folder(tmp_path: Any) -> None:
    chat_tokenizer(CHATML, "<|im_end|>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML
    assert "tokenizer must be a folder, got 'no/such'" in message(load_tokenizer, "no/such")
    (tmp_path / "tokenizer.json").write_text("{")
    assert "tokenizer cannot be loaded from" in message(load_tokenizer, str(tmp_path))
