"""A real server of OpenEnv, through the protocol."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import wait_for
from needs import need

need("transformers", "websockets", "openenv")

from chat_tokenizers import CHATML, chat_tokenizer  # noqa: E402
from environment_episodes import played, turn_of  # noqa: E402
from refusals import message  # noqa: E402

from backends.adapters.openenv import OpenEnv  # noqa: E402

pytestmark = pytest.mark.slow  # its server imports OpenEnv
GAME = Path(__file__).parents[2] / "support" / "openenv_game.py"
TOKENIZER = chat_tokenizer(CHATML, "<|im_end|>")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server listens on our socket, so that nobody else is given its port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port, at = bound.getsockname()[1], bound.fileno()
        with subprocess.Popen([sys.executable, str(GAME), str(at)], pass_fds=[at]) as server:
            try:
                wait_for(lambda: answers(port), server)
                yield f"http://127.0.0.1:{port}"
            finally:
                server.terminate()


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=600):
        return True
    return False


def test_a_game_is_played_in_text(url: str) -> None:
    """Problem 3 has seed 6, so the number is 6; each wrong guess costs an eighth."""
    told = played(OpenEnv(url=url, observation="hint", system="0 to 9. "), "4", "7", "6", tokenizer=TOKENIZER, index=3)
    assert told.prompt == "0 to 9. guess: "
    assert told.observed == [" higher: ", " lower: ", ""]
    assert (told.reward, told.done) == (0.75, True)


def test_a_game_is_played_in_messages(url: str, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    game = OpenEnv(url=url, observation="hint", system="0 to 9.", tokenizer=str(tmp_path))
    told = played(game, "4<|im_end|>", "6", tokenizer=TOKENIZER, index=3)
    assert told.prompt == (
        "<|im_start|>system\n0 to 9.<|im_end|>\n<|im_start|>user\nguess: <|im_end|>\n<|im_start|>assistant\n"
    )
    assert told.observed == ["\n<|im_start|>user\n higher: <|im_end|>\n<|im_start|>assistant\n", ""]
    assert (told.reward, told.done) == (0.875, True)


def test_all_of_an_observation_is_json(url: str) -> None:
    assert played(OpenEnv(url=url), tokenizer=TOKENIZER).prompt == '{"hint": "guess: "}'


def test_sessions_are_their_own_and_an_episode_that_was_given_up_is_gone(url: str) -> None:
    async def two() -> list[Any]:
        one, other = OpenEnv(url=url, observation="hint"), OpenEnv(url=url, observation="hint")
        await one.reset(1, held_out=False)
        await other.reset(1, held_out=True)
        first = [await one.step(turn_of("2", TOKENIZER)), await other.step(turn_of("3", TOKENIZER))]
        await one.reset(2, held_out=False)
        again = await one.step(turn_of("4", TOKENIZER))
        await one.close()
        await other.close()
        return [*first, again]

    assert all(seen.done for seen in asyncio.run(two()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"observation": "board"}, "the observation has no field 'board'"),
        ({"action": "text", "observation": "hint"}, "the server answered step with .*error"),
    ],
)
def test_a_server_that_has_other_fields_fails_the_rollout(url: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        played(OpenEnv(url=url, **settings), "4", tokenizer=TOKENIZER)


def test_a_wrong_address_is_one_line() -> None:
    refusal = message(OpenEnv, url="localhost:8000")
    assert refusal.endswith("url must be ws://HOST:PORT or http://HOST:PORT, got 'localhost:8000'")


def test_the_driver_plays_on_the_server(url: str, tmp_path: Path) -> None:
    """The fake engine writes letters, which are no guess: every episode has all its three turns, and none fails."""
    in_memory = pytest.importorskip("in_memory")
    task = {"name": "backends.adapters.openenv:OpenEnv", "settings": {"url": url, "observation": "hint"}}
    config = in_memory.turns_of(steps=2, count=2, most=3, train={"task": task})
    summary = in_memory.run_checked(config, tmp_path / "run")
    assert (summary.rollouts.failed, summary.samples_trained) == (0, 16)
    assert summary.environments.turns_mean >= 3.0
