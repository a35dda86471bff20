"""A real driver on engines and a trainer in memory: builders that several test modules share."""

import json
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")  # TensorBoard's writer is torch's
pytest.importorskip("tensorboard")

from ledger_check import check_ledger

from backends.driver.checkpoint import read_newest
from backends.fake import FakeCodec, FakeEngine, FakeReference, FakeTrainer
from backends.interface import GroupMembers, MoreEngines
from backends.interface import Parts as DriverParts
from backends.owner import driving
from backends.run import drive
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import RunFailedError
from pipelinerl.rl.problems import Problem

KINDS = ("keep", "recompute", "abort", "wait")


def config_of(*, steps=6, batch=8, group=4, slots=6, engines=2, kind="pipeline", longest=12, train=None, **scheduler):
    accelerators = engines if kind == "conventional" else engines + 1
    data = {
        "optimizer_steps": steps,
        "cluster": {"accelerators": accelerators, "generation_accelerators": engines},
        "scheduler": {"kind": kind, "train_batch_size": batch, "generation_batch_size": slots, **scheduler},
        "workload": {"group_size": group, "length": {"kind": "uniform", "max": longest}},
        "hardware": {"decode": {"kind": "affine", "step_s": 0.01}, "training": {"token_s": 1e-4}},
        "train": {
            "device": "cpu",
            "model": {"path": "nowhere"},
            "task": {"name": "arithmetic"},
            "optimizer": {"learning_rate": 1e-3},
            **(train or {}),
        },
    }
    return RunConfig.model_validate_json(json.dumps(data))


def turns_of(*, count=4, most=4, context_max=200, observation_max=10, settings=None, name="Game", train=None, **keys):
    """A run whose rollouts play a game of ``tests/support/games.py``, unless ``train`` has another task."""
    limits = keys.pop("limits", {})
    task = {"name": f"games:{name}", "settings": settings or {}}
    config = config_of(**keys, train={"task": task, **(train or {})})
    table = {"kind": "lognormal", "mean": 2.0, "max": most}
    table |= {"observation_max": observation_max, "context_max": context_max}
    data = json.loads(config.model_dump_json(exclude_none=True))
    data["environment"] = {"count": count, "turns": table, **limits}
    return RunConfig.model_validate_json(json.dumps(data))


class Letters:
    """Rewards an answer with its share of the letter b, or as a function of the problem; some problems raise.

    ``odd_prompt``: of all problems of odd index.
    """

    num_held_out = None

    def __init__(self, *, raises_every=0, reward=None, odd_prompt=None):
        self.raises_every, self.given, self.odd_prompt = raises_every, reward, odd_prompt

    def problem(self, index, *, held_out):
        usual = f"{'held out' if held_out else 'problem'} {index}"
        return Problem(usual if self.odd_prompt is None or index % 2 == 0 else self.odd_prompt, index)

    def reward(self, problem, answer):
        if self.raises_every and problem.expected % self.raises_every == 0:
            raise RuntimeError("no reward today")
        return self.given(problem) if self.given else answer.count("b") / max(1, len(answer))


class Interrupts(Letters):
    """Presses Ctrl-C in a reward, once; the others take long then, so that the trainer has nothing to do."""

    def __init__(self, *, when):
        super().__init__()
        self.when, self.done = when, False

    def reward(self, problem, answer):
        if self.when(problem):
            if self.done:
                time.sleep(5.0)  # in threads that nobody waits for
            else:
                self.done = True
                time.sleep(0.3)
                interrupt()
        return super().reward(problem, answer)


class Asked(FakeEngine):
    """Keeps its requests and answers."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.requests, self.answers = [], []

    async def generate(self, request):
        self.requests.append(request)
        answer = await super().generate(request)
        self.answers.append(answer)
        return answer


@dataclass
class Parts:
    """What a test changes before it runs; the engines' ids are their places."""

    engines: list
    trainer: FakeTrainer
    task: Letters
    reference: FakeReference | None = None
    group: GroupMembers | None = None
    lost: Callable[[], str | None] | None = None
    more: MoreEngines | None = None


def parts_of(config, *, trainer=None, task=None, step_s=0.0, engine=FakeEngine, reference=None):
    slots = config.scheduler.generation_batch_size
    engines = [engine(num_slots=slots, step_s=step_s) for _ in range(config.num_engines)]
    kl_coefficient = config.train.loss.kl_coefficient
    if trainer is None:
        trainer = FakeTrainer(train_batch_size=config.scheduler.train_batch_size, kl_coefficient=kl_coefficient)
    return Parts(
        engines,
        trainer,
        task or Letters(),
        reference or (FakeReference() if config.train.loss.needs_reference else None),
    )


def run(config, out, parts, *, resume=False):
    driven = DriverParts(
        engines=dict(enumerate(parts.engines)),
        trainer=parts.trainer,
        codec=FakeCodec(),
        reference=parts.reference,
        group=parts.group,
        lost=parts.lost,
        more=parts.more,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TensorBoard's
        with driving(out) as lock:
            checkpoint = read_newest(out, config) if resume else None
            return drive(config, parts=driven, task=parts.task, lock=lock, checkpoint=checkpoint)


def run_checked(config, out, parts=None, *, resume=False):
    """Run, and check the folder as that of any finished run."""
    summary = run(config, out, parts or parts_of(config), resume=resume)
    check_ledger(out, config, summary)
    return summary


def interrupt():
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def interrupted(config, out, parts=None, *, at=3, resume=False):
    """Run parts that press Ctrl-C themselves; without any, Ctrl-C comes while step ``at`` is being trained."""
    if parts is None:
        parts = parts_of(config, trainer=Killer(train_batch_size=8, at=at, do=interrupt))
    with pytest.raises(RunFailedError, match="interrupted"):
        run(config, out, parts, resume=resume)


class Killer(FakeTrainer):
    """Does something when a step begins, or when it has exported."""

    def __init__(self, *, at=None, do=None, on_export=None, **settings):
        super().__init__(**settings)
        self.at, self.do, self.on_export = at, do, on_export

    async def train(self, samples, *, completes_step):
        if self.version == self.at:
            self.at = None
            self.do()
        return await super().train(samples, completes_step=completes_step)

    async def export(self, folder):
        await super().export(folder)
        if self.on_export:
            self.on_export()


class Shared(Killer):
    """Cannot do anything while the engines have its memory."""

    has_memory = True

    async def train(self, samples, *, completes_step):
        assert self.has_memory
        return await super().train(samples, completes_step=completes_step)

    async def save(self, folder):
        assert self.has_memory
        await super().save(folder)

    async def export(self, folder):
        assert self.has_memory
        await super().export(folder)

    async def offload(self):
        self.has_memory = False

    async def reload(self):
        self.has_memory = True
