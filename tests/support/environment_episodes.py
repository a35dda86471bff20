"""Episodes of an environment, played as a driver plays them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from pipelinerl.config.run import RunConfig
from pipelinerl.rl.environments import Content, Environment, Turn


@dataclass
class Episode:
    prompt: str
    observed: list[str]
    reward: float = 0.0
    done: bool = False


def tokens_of(content: Content, tokenizer: Any) -> list[int]:
    return tokenizer.encode(content, add_special_tokens=False) if isinstance(content, str) else list(content)


def turn_of(tokens: list[int], tokenizer: Any) -> Turn:
    return Turn(tuple(tokens), tokenizer.decode(tokens, skip_special_tokens=True))


async def play(environment: Environment, *answers: str, tokenizer: Any, index: int = 0) -> Episode:
    """Play an episode in which the model writes these answers, and close the environment."""
    try:
        return await _told(environment, *answers, tokenizer=tokenizer, index=index)
    finally:
        await environment.close()


async def _told(environment: Environment, *answers: str, tokenizer: Any, index: int) -> Episode:
    prompt = await environment.reset(index, held_out=False)
    told = Episode(tokenizer.decode(tokens_of(prompt, tokenizer)), [])
    for answer in answers:
        assert not told.done
        seen = await environment.step(turn_of(tokens_of(answer, tokenizer), tokenizer))
        told.observed.append(tokenizer.decode(tokens_of(seen.content, tokenizer)))
        told.reward, told.done = told.reward + seen.reward, seen.done
    return told


def played(environment: Environment, *answers: str, tokenizer: Any, index: int = 0) -> Episode:
    return asyncio.run(play(environment, *answers, tokenizer=tokenizer, index=index))


def with_turns(config: RunConfig, *, count: int) -> RunConfig:
    """Return a run with so many environments, and episodes of three turns at most."""
    turns = {"kind": "lognormal", "mean": 2.0, "max": 3, "observation_max": 60, "context_max": 400}
    data = json.loads(config.model_dump_json(exclude_none=True))
    data["environment"] = {"count": count, "turns": turns}
    return RunConfig.model_validate_json(json.dumps(data))
