"""Episodes of an environment, played as a driver plays them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.rl.environments import Content, Environment, Turn


@dataclass
class Episode:
    prompt: str
    observed: list[str] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


def turn_of(answer: str, tokenizer: Any) -> Turn:
    """Return the turn of a model that writes this answer."""
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    return Turn(tuple(tokens), tokenizer.decode(tokens, skip_special_tokens=True))


async def play(environment: Environment, *answers: str, tokenizer: Any, index: int = 0) -> Episode:
    """Play an episode in which the model writes these answers, and close the environment."""

    def text(content: Content) -> str:
        return content if isinstance(content, str) else tokenizer.decode(list(content))

    try:
        episode = Episode(text(await environment.reset(index, held_out=False)))
        for answer in answers:
            assert not episode.done
            seen = await environment.step(turn_of(answer, tokenizer))
            episode.observed.append(text(seen.content))
            episode.reward, episode.done = episode.reward + seen.reward, seen.done
        return episode
    finally:
        await environment.close()


def played(environment: Environment, *answers: str, tokenizer: Any, index: int = 0) -> Episode:
    return asyncio.run(play(environment, *answers, tokenizer=tokenizer, index=index))
