"""The base model: a policy that has seen demonstrations, made the same way every time."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

from pipelinerl.config.run import PolicyConfig
from sim.learning.policy import PolicyShape, Weights, forward, initial_weights
from sim.learning.tasks import END, NUM_WORDS, TokenTask, make_task
from sim.workload import named_stream

IGNORED = -100
"""Target of a position that is not learned."""


@lru_cache(maxsize=4)
def _made(policy_json: str, positions: int) -> Weights:
    config = PolicyConfig.model_validate_json(policy_json)
    task, start = make_task(config), config.warm_start
    shape = policy_shape(config, positions=positions)
    weights = initial_weights(shape, seed=start.seed % 2**63)
    for one in weights.values():
        one.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=start.learning_rate, betas=(0.9, 0.98))
    for step in range(start.steps):
        for group in optimizer.param_groups:
            group["lr"] = start.learning_rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / start.steps)
        word_BT, target_BT = _demonstrations(task, start.seed, step, start.batch_size)
        logit_BTV, _ = forward(weights, shape, word_BT)
        loss = functional.cross_entropy(logit_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    return {name: one.detach() for name, one in weights.items()}


def base_model(config: PolicyConfig, *, positions: int) -> Weights:
    """Return fresh copies of the weights that every run of this policy starts from; made once per process.

    They depend on task, sizes (``positions``: longest prompt and answer together, in tokens) and ``warm_start`` only.
    """
    used = config.model_copy(update={"learning_rate": 1.0, "gradient_clip": 1.0, "temperature": 1.0})
    weights = _made(used.model_dump_json(exclude={"loss"}), positions)
    return {name: one.clone() for name, one in weights.items()}


def policy_shape(config: PolicyConfig, *, positions: int) -> PolicyShape:
    """Return the sizes of a policy."""
    return PolicyShape(
        words=NUM_WORDS, positions=positions, layers=config.layers, width=config.width, heads=config.heads
    )


def _demonstrations(task: TokenTask, seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a batch of demonstrations and the word that is to follow each, shapes [B, T]."""
    stream = named_stream(seed, "demonstrations", step)
    prompts = [task.draw(stream) for _ in range(size)]
    rows = [[*prompt, *task.demonstrate(prompt, stream)] for prompt in prompts]
    length = max(map(len, rows)) - 1
    word_BT = torch.zeros(size, length, dtype=torch.int64)
    target_BT = torch.full((size, length), IGNORED)
    for place, row in enumerate(rows):
        word_BT[place, : len(row) - 1] = torch.tensor(row[:-1])
        first = task.prompt_tokens - 1
        target_BT[place, first : len(row) - 1] = torch.tensor(row[first + 1 :])
    target_BT[word_BT == END] = IGNORED  # tokens of the environment
    return word_BT, target_BT
