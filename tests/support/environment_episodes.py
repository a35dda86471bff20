"""Episodes of an environment, played as a driver plays them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from backends.fake import FakeEngine
from backends.interface import GenerateRequest
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


async def rolled_out(
    environment: Environment, *, tokenizer: Any, seed: int, turns: int = 4
) -> tuple[list[int], list[list[int]], bool]:
    """Play an episode with the fake engine: return all tokens, what was generated in each turn, whether it is over."""
    engine = FakeEngine()
    await engine.start()
    try:
        return await _rolled_out(environment, engine, tokenizer=tokenizer, seed=seed, turns=turns)
    finally:
        await environment.close()
        await engine.shutdown()


async def _rolled_out(
    environment: Environment, engine: FakeEngine, *, tokenizer: Any, seed: int, turns: int
) -> tuple[list[int], list[list[int]], bool]:
    tokens, generated, done = tokens_of(await environment.reset(seed, held_out=False), tokenizer), [], False
    while not done and len(generated) < turns:
        sampling = {"max_new_tokens": 12, "seed": seed + len(generated), "temperature": 1.0}
        answer = await engine.generate(GenerateRequest(rollout_id=seed, prompt_tokens=tuple(tokens), **sampling))
        generated.append(answer.tokens_T.tolist())
        seen = await environment.step(turn_of(generated[-1], tokenizer))
        tokens += [*generated[-1], *tokens_of(seen.content, tokenizer)]
        done = seen.done
    return tokens, generated, done


def with_turns(config: RunConfig, *, count: int) -> RunConfig:
    """Return a run with so many environments, and episodes of three turns at most."""
    turns = {"kind": "lognormal", "mean": 2.0, "max": 3, "observation_max": 60, "context_max": 400}
    data = json.loads(config.model_dump_json(exclude_none=True))
    data["environment"] = {"count": count, "turns": turns}
    return RunConfig.model_validate_json(json.dumps(data))
