"""A language model small enough for a laptop: 82 496 parameters, one task, one token per character.

Reinforcement learning improves it within minutes on a CPU. Two rounds of supervised learning on *training* problems
make it:

1. the right answers, until greedy answers to held-out problems are nearly all right;
2. the same with a share of each target's probability spread evenly over the whole vocabulary (label smoothing): a
   third for sums, whose answers have two or three tokens, 1/33 for chains of 30 to 84 tokens. An answer sampled at
   temperature 1 is then right 20 % to 40 % of the time.

A model that is merely stopped early learns less (one trial: 30 % to 60 % in 200 steps): presumably it solves some
problems often and others never, and groups without a right answer carry no gradient. Here every problem has one.

The embeddings are untied, since vLLM on CPU cannot reload tied ones; the weights are float32.
One seed on one torch thread gives the same weights on one machine and torch version.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.rl.environments import Turn
from pipelinerl.rl.tasks import Arithmetic, Calculator, Chain

# Legend of shapes: N problems; L token position.


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the model of one task is fitted."""

    task: Arithmetic | Chain | Calculator
    fit_steps: int
    soften_steps: int
    """On smoothed labels (fewer if ``fit_steps`` is smaller)."""
    smoothing: float
    """Share of a target's probability that is spread over the vocabulary."""
    batch: int
    max_new_tokens: int
    """Where sampled answers are cut, and turns."""
    max_turns: int = 1
    """Where sampled episodes are cut."""


RECIPES = {
    "arithmetic": Recipe(Arithmetic(), fit_steps=2000, soften_steps=100, smoothing=0.36, batch=128, max_new_tokens=6),
    "chain": Recipe(Chain(), fit_steps=600, soften_steps=100, smoothing=0.03, batch=32, max_new_tokens=100),
    "calculator": Recipe(
        Calculator(), fit_steps=400, soften_steps=100, smoothing=0.1, batch=32, max_new_tokens=8, max_turns=5
    ),
}

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
CHARACTERS = "0123456789+-*=?abcdefghijklmnopqrstuvwxyz .,:ABCDEFGHIJKLMNOP"
"""With the special tokens 64: every number the model can sample is a token."""
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
NO_TARGET = -100  # torch's cross-entropy skips it


def make_tiny_model(
    folder: str | Path, *, task: str = "arithmetic", seed: int = 0, fit_steps: int | None = None
) -> float:
    """Make the model and its tokenizer, fit it, and save both in Hugging Face format, replacing files.

    ``task``: a name in ``RECIPES``, else ``ValueError``. ``fit_steps``: optimizer steps on right answers; None: the
    recipe's; 0 leaves the model as drawn. Returns the share of held-out problems answered right, one answer each,
    sampled at temperature 1 (in [0, 1]).
    """
    if task not in RECIPES:
        raise ValueError(f"task must be {' or '.join(RECIPES)}, got {task!r}")
    recipe = RECIPES[task]
    steps = recipe.fit_steps if fit_steps is None else fit_steps
    if steps < 0:
        raise ValueError(f"fit_steps must be at least 0, got {fit_steps}")
    tokenizer = make_tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of floats then have one order
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _make_model(tokenizer)
            data = _training_set(recipe.task, tokenizer)
            _fit(model, *data, steps=steps, batch=recipe.batch, learning_rate=5e-3, smoothing=0.0)
            soften_steps = min(recipe.soften_steps, steps)
            _fit(model, *data, steps=soften_steps, batch=recipe.batch, learning_rate=1e-3, smoothing=recipe.smoothing)
            rate = success_rate(model, tokenizer, recipe)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return rate


def make_tokenizer() -> Any:
    """Return the tokenizer: one token per character, no token added to a prompt."""
    vocabulary = {token: number for number, token in enumerate([PAD, EOS, BOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, bos_token=BOS, unk_token=PAD, model_max_length=512
    )


def success_rate(model: Any, tokenizer: Any, recipe: Recipe) -> float:
    """Return the share of held-out problems answered right, end token included, at temperature 1 (in [0, 1])."""
    task = recipe.task
    if isinstance(task, Calculator):
        return asyncio.run(_play(model, tokenizer, recipe, task))
    problems = [task.problem(index, held_out=True) for index in range(task.num_held_out)]
    turns = _sampled(model, tokenizer, recipe, [tokenizer.encode(one.prompt) for one in problems])
    right = sum(
        task.reward(problem, tokenizer.decode(tokens, skip_special_tokens=True))
        for problem, tokens in zip(problems, turns, strict=True)
        if tokenizer.eos_token_id in tokens
    )
    return right / len(problems)


async def _play(model: Any, tokenizer: Any, recipe: Recipe, task: Calculator) -> float:
    """Return the share of all held-out problems solved; all take their turns together."""
    environments = [copy.copy(task) for _ in range(task.num_held_out)]
    texts = [tokenizer.encode(await one.reset(index, held_out=True)) for index, one in enumerate(environments)]
    playing, reward = list(range(len(environments))), 0.0
    for _ in range(recipe.max_turns):
        turns = _sampled(model, tokenizer, recipe, [texts[one] for one in playing])
        for one, tokens in zip(tuple(playing), turns, strict=True):
            answer = await environments[one].step(Turn((), tokenizer.decode(tokens, skip_special_tokens=True)))
            texts[one] += tokens + tokenizer.encode(answer.content)
            reward += answer.reward
            if answer.done:
                playing.remove(one)
    return reward / len(environments)


def _sampled(model: Any, tokenizer: Any, recipe: Recipe, texts: list[list[int]]) -> list[list[int]]:
    if not texts:
        return []
    padded = tokenizer.pad({"input_ids": texts}, padding_side="left", return_tensors="pt")
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=recipe.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.no_grad():
        sampled_NL = model.generate(**padded, generation_config=config)
    written = sampled_NL[:, padded["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in written]


def _make_model(tokenizer: Any) -> Any:
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "bos")}
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False, dtype="float32", **special)).float()
    model.generation_config = GenerationConfig(**special)
    return model


def _training_set(task: Arithmetic | Chain | Calculator, tokenizer: Any) -> tuple[Any, Any]:
    """Return all training problems with their answers, [N, L], and the token to predict at each place, [N, L]."""
    rows = []
    for index in range(task.num_training):
        tokens: list[int] = []
        targets: list[int] = []
        for text, own in _worked(task, index):
            new = tokenizer.encode(text) + [tokenizer.eos_token_id] * own
            tokens += new
            targets += new if own else [NO_TARGET] * len(new)
        rows.append((tokens, [*targets[1:], NO_TARGET]))
    length = max(len(tokens) for tokens, _ in rows)
    tokens_NL = torch.full((len(rows), length), tokenizer.pad_token_id)
    target_NL = torch.full((len(rows), length), NO_TARGET)
    for row, (tokens, targets) in enumerate(rows):
        tokens_NL[row, : len(tokens)], target_NL[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(targets)
    return tokens_NL, target_NL


def _worked(task: Arithmetic | Chain | Calculator, index: int) -> list[tuple[str, bool]]:
    """Return the texts of a right answer to a training problem, prompt first, and whether each is the model's."""
    if isinstance(task, Calculator):
        return task.worked_episode(index)
    problem = task.problem(index, held_out=False)
    return [(problem.prompt, False), (task.worked_answer(problem), True)]


def _fit(
    model: Any, tokens_NL: Any, target_NL: Any, *, steps: int, batch: int, learning_rate: float, smoothing: float
) -> None:
    """Make optimizer steps on shuffled problems, the learning rate going down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    order_N, start = torch.randperm(len(tokens_NL)), 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 50) * (1 - step / steps)
        if start + batch > len(order_N):
            order_N, start = torch.randperm(len(tokens_NL)), 0
        chosen, start = order_N[start : start + batch], start + batch
        logits = model(input_ids=tokens_NL[chosen], use_cache=False).logits  # padding is on the right, causally unseen
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target_NL[chosen].flatten(), ignore_index=NO_TARGET, label_smoothing=smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
