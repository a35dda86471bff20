"""A server of OpenEnv with a guessing game: ``python openenv_game.py PORT``."""

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str = ""


class Game(Environment):
    """A number from 0 to 9, the seed's last digit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.secret = (seed or 0) % 10
        return Hint(hint="guess: ")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        guess = int(action.message) if action.message.strip().isdecimal() else -1
        if guess == self.secret:
            return Hint(reward=1.0, done=True)
        return Hint(hint=" higher: " if guess < self.secret else " lower: ", reward=-0.125)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Game, Guess, Hint, env_name="game", max_concurrent_envs=8)
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
