"""What a seed of the fault campaign draws: the settings of a run, how long its parts take, and its faults.

A fault comes when a call of a kind is made for the nth time, plus ``delay_s``; calls of all attempts of a run count.
A new kind is a member of ``Kind``, a method of ``simulated_run.World`` and, if need be, a line of ``_fault``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum

from in_memory import config_of, turns_of

from backends.preflight import check_run
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.scheduler.events import OnFull, OnStale


class Kind(StrEnum):
    KILL = "kill"
    """Engines die."""
    HANG = "hang"
    """Engines stand still until their time-out, ``seconds``, ends them."""
    SLOW = "slow"
    """Engines decode 20 times as slowly, for ``seconds``."""
    NO_START = "no start"
    """The next ``number`` starts of engines fail."""
    DAMAGED = "damaged"
    """Engines, or the sender, refuse the bytes of the next ``number`` transfers."""
    NOT_SENT = "not sent"
    """The next ``number`` transfers fail before an engine has anything; in memory the engine is lost in its update."""
    REFUSED = "refused"
    """Engines cannot answer the next ``number`` requests."""
    LOSE_TRAINER = "lose trainer"
    LOSE_REFERENCE = "lose reference"
    REWARD_RAISES = "reward raises"
    REWARD_HANGS = "reward hangs"
    """The next ``number`` rewards, or answers of environments, do not come."""
    ENVIRONMENT_DIES = "environment dies"
    DISK_FULL = "disk full"
    """Until the attempt has ended."""
    CTRL_C = "ctrl-c"
    SUDDEN_END = "sudden end"
    """The driver's process is gone, with all that it has not written."""
    ADD = "add"
    """``number`` engines are added."""
    DRAIN = "drain"
    """``engines`` are removed within ``seconds``, if others are left."""


ENGINES = (Kind.KILL, Kind.HANG, Kind.SLOW)
OFTEN = (
    *(*ENGINES, Kind.DAMAGED, Kind.NOT_SENT, Kind.REWARD_RAISES, Kind.REWARD_HANGS, Kind.ENVIRONMENT_DIES),
    *(Kind.KILL, Kind.KILL, Kind.HANG, Kind.CTRL_C),
)
CHANGES = (Kind.ADD, Kind.DRAIN)
FAULTS = tuple(one for one in Kind if one not in CHANGES)
STORM = (*ENGINES, Kind.NOT_SENT, Kind.CTRL_C, Kind.SUDDEN_END)
"""Of a case with many faults."""
CALLS = {
    "step": 300,
    "start": 6,
    "generate": 100,
    "abort": 6,
    "update": 20,
    "sleep": 10,
    "train": 12,
    "publish": 8,
    "send": 8,
    "snapshot": 4,
    "save": 3,
    "reward": 60,
    "disk": 60,
    "shutdown": 3,
}
"""Kinds of calls, and the largest nth."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    call: str
    nth: int
    """From 1."""
    delay_s: float
    engines: tuple[int, ...] = ()
    number: int = 1
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    config: RunConfig
    sends: bool
    """Weights are sent through a group; else they are in memory, as in a file."""
    mean_s: dict[str, float]
    """Of each kind of call."""
    faults: tuple[Fault, ...] = field(repr=False)
    more_steps: int
    """By which the run is made longer once it is done."""


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    rng = random.Random(seed)
    while True:
        try:
            config = _config(rng, seed)
            break
        except (ConfigError, ValueError):
            continue
    gives_up = config.scheduler.on_stale is not OnStale.TRAIN or config.scheduler.on_full is not OnFull.WAIT
    scale = rng.choice([0.1, 1.0, 1.0, 1.0 if gives_up else 10.0])  # else thousands are given up in a step
    mean_s = {
        call: scale * rng.choice([1e-3, 0.1, 1.0, 10.0])
        for call in ("update", "train", "publish", "send", "snapshot", "save", "sleep", "export")
    }
    mean_s |= {
        "reward": rng.choice([1e-3, 0.1, 10.0]),
        "step": rng.choice([0.02, 0.1]),
        "start": rng.choice([0.1, 10.0, 60.0]),
        "shutdown": 0.5,
    }
    some = FAULTS if rng.random() < 0.8 else STORM
    numbers = [0, 1, 2, 3, 4, 6, 9] if some is not STORM else [10, 20, 30]
    faults = tuple(_fault(rng, config, mean_s, some) for _ in range(rng.choice(numbers)))
    changing = random.Random(-1 - seed)  # so that the draws of faults stay as they are
    faults += tuple(_fault(changing, config, mean_s, CHANGES) for _ in range(changing.choice([0, 0, 1, 2, 5])))
    sends = not config.colocated and rng.random() < 0.4
    more_steps = rng.choice([0, 0, 0, 1, 3]) if config.scheduler.kind != "one_step_off" else 0
    return Case(seed, config, sends, mean_s, faults, more_steps)


def _config(rng: random.Random, seed: int) -> RunConfig:
    kind = rng.choice(["pipeline"] * 5 + ["conventional", "conventional", "one_step_off"])
    group = rng.choice([1, 2, 4])
    keys = {
        "kind": kind,
        "weight_update": rng.choice(["keep", "recompute", "abort", "wait"]),
        "micro_batch_size": rng.choice([None, None, 4]),
        "max_lag": rng.choice([None, None, 0, 1, 2, 3]),
        "on_stale": rng.choice(["train", "drop", "requeue"]),
        "discard_limit": 100_000,
    }
    if kind == "pipeline":
        keys |= {"publish_every": rng.choice([1, 1, 1, 2, 3]), "on_full": rng.choice(["wait", "wait", "drop_oldest"])}
        keys |= {"ready_queue_size": rng.choice([None, 8, 16])}
    else:
        keys["optimizer_steps_per_rl_step"] = rng.choice([1, 1, 2, 3])
    if group > 1 and rng.random() < 0.15:
        keys["filter_no_signal"] = True
    train = {
        "checkpoint": {
            "every": rng.choice([None, 1, 2, 3]),
            "keep": rng.choice([1, 2]),
            "export_every": rng.choice([None, None, 2]),
        },
        "trainer": {"restarts": rng.choice([0, 1, 3])},
        "engine": {"restarts_per_hour": rng.choice([1, *[1000] * 7])},
        "loss": {"kl_coefficient": rng.choice([0.0, 0.0, 0.1])},
        "evaluation": rng.choice([{}, {}, {"problems": 3}, {"problems": 5, "every": 2}]),
    }
    keys |= {
        "steps": rng.randint(3, 9),
        "group": group,
        "slots": rng.choice([1, 4, 6, 12]),
        "engines": rng.randint(1, 4),
    }
    keys |= {"longest": rng.choice([6, 20, 60])}
    if rng.random() < 0.25:
        limits = {"lifetime_s": rng.choice([None, 2000.0]), "retries": rng.choice([0, 1])}
        limits |= {"step_timeout_s": 60.0, "reset_timeout_s": 60.0}
        config = turns_of(count=rng.choice([4, 12]), limits=limits, context_max=400, train=train, **keys)
    else:
        config = config_of(train=train, **keys)
    check_run(config := config.model_copy(update={"seed": seed}))
    return config


def _fault(rng: random.Random, config: RunConfig, mean_s: dict[str, float], some: tuple[Kind, ...]) -> Fault:
    kind = rng.choice([*some, *(one for one in OFTEN if one in some)])
    call = rng.choice(list(CALLS))
    nth = 1 + min(int(rng.expovariate(3.0 / CALLS[call])), CALLS[call])
    delay_s = rng.choice([0.0, rng.random(), 2 * rng.random()]) * mean_s.get(call, 0.1)
    several = rng.random() < 0.3
    engines = tuple(sorted(rng.sample(range(config.num_engines), rng.randint(1, config.num_engines) if several else 1)))
    number = rng.choice([1, 1, 1, 2, 4])
    if kind is Kind.NO_START:
        number = min(number, config.num_engines - 1)
    return Fault(kind, call, nth, delay_s, engines, number, seconds=rng.choice([1.0, 20.0, 100.0]))
