"""Messages to tokens by a chat template, so that generated text is never tokenized again.

A conversation is kept as tokens. New messages give the tokens that the template writes *after* an answer, with the
mark of the next answer at their end. The template is given a placeholder for the answer: so a template that changes
answers once they are history, by leaving out their reasoning, changes nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError, install
from pipelinerl.util.user_code import first_line

Message = Mapping[str, Any]
"""``role``, ``content`` and further keys of the template."""
_ANSWER = "PIPELINERL-ANSWER-PLACEHOLDER"


class ChatTokens:
    """A tokenizer whose chat template shows answers (else ``ConfigError``), perhaps the JSON schemas of ``tools``."""

    def __init__(self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("train.task.settings.tokenizer must have a chat template (chat_template)")
        self._tokenizer, self._tools = tokenizer, [dict(one) for one in tools]
        self._special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        try:
            self._behind_answer([])
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            raise _unusable(first_line(error)) from error

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of the first messages; the model answers next."""
        return self._encode(self._text(messages))

    def after(self, generated: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens after generated ones: an end, if they have none, new messages, the next mark."""
        tokens = self._encode(self._behind_answer(messages))
        if not (self._ended(generated) and generated[-1] in tokens):
            return tokens
        end = tokens.index(generated[-1])
        return tokens if self._tokenizer.decode(tokens[:end]).strip() else tokens[end + 1 :]

    def text(self, generated: Sequence[int]) -> str:
        """Return the text of generated tokens without the end token; other special tokens stay visible."""
        shown = list(generated[:-1] if self._ended(generated) else generated)
        return str(self._tokenizer.decode(shown, skip_special_tokens=False))

    def _ended(self, generated: Sequence[int]) -> bool:
        return bool(generated) and generated[-1] in self._special

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _behind_answer(self, messages: Sequence[Message]) -> str:
        answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
        _, shown, text = self._text(answered).partition(_ANSWER)
        if not shown:
            raise _unusable("it leaves answers of the model out")
        return text

    def _text(self, messages: Sequence[Message]) -> str:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        shown = [dict(one) for one in messages]
        return str(self._tokenizer.apply_chat_template(shown, tools=self._tools or None, **options))


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in a folder; ``ConfigError`` if it cannot be loaded, or transformers is not installed."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing("transformers", extra="train") from error
    if not Path(path).is_dir():
        raise ConfigError(f"train.task.settings.tokenizer must be a folder, got {path!r}")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # its errors have no common root
        raise ConfigError(
            f"train.task.settings.tokenizer cannot be loaded from {path!r}: {first_line(error)}"
        ) from error


def missing(package: str, *, extra: str) -> ConfigError:
    """Return the error of an environment whose package is not installed."""
    return ConfigError(f"train.task.name needs the package {package}: {install(extra)}")


def _unusable(reason: str) -> ConfigError:
    return ConfigError(f"train.task.settings.tokenizer: its chat template cannot be used: {reason}")
