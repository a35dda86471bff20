"""Simulated runs with their ledger, events and commands, for tests against theory.

By default a decode step lasts 1 s with any batch, and all else takes no time.
"""

from __future__ import annotations

from pipelinerl.config.run import RunConfig, parse_run
from pipelinerl.records.ledger import RunLedger
from pipelinerl.scheduler.events import RolloutFinished, StartTraining
from sim.cluster import SimulatedCluster
from sim.engine import ClosedFormEngine


class Keeping(RunLedger):
    """A ledger that keeps every event and command with its time."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.entries = []

    def event(self, time_s, event):
        self.entries.append((time_s, event))
        super().event(time_s, event)
        if self.turns is not None:
            self.turns.event(time_s, event)

    def command(self, time_s, command):
        self.entries.append((time_s, command))
        super().command(time_s, command)
        if self.turns is not None:
            self.turns.command(time_s, command)


class Played(Keeping):
    """A simulated run."""

    def __init__(self, config: RunConfig, **cluster):
        super().__init__(
            num_engines=config.num_engines,
            colocated=config.colocated,
            longest=config.longest_answer_tokens,
            environments=config.environment and config.environment.count,
        )
        self.config = config
        self.cluster = SimulatedCluster(config, **cluster)
        self.cluster.run(self)

    def of(self, *kinds):
        """Times and entries of some kinds."""
        return [(time_s, entry) for time_s, entry in self.entries if isinstance(entry, kinds)]

    @property
    def trained(self):
        """Ids of the rollouts trained on, in order."""
        return [rollout_id for _, entry in self.of(StartTraining) for rollout_id in entry.rollout_ids]

    def lag_mean(self, first, last=None):
        """Mean token lag of steps ``first`` to ``last`` (counted from 0)."""
        rows = self.steps[first:last]
        return sum(row.tokens * row.lag_mean for row in rows) / sum(row.tokens for row in rows)


def play(
    steps, *, batch, slots, length, engines=1, group_size=1, prompt_tokens=0, success_rate=0.5, hardware=None, seed=0,
    environment=None, fleet=None, faults=None, generation=None, make=ClosedFormEngine, **scheduler,
):  # fmt: skip
    """Simulate ``engines`` accelerators that generate and one that trains; conventional: all do both.

    All other keys are those of the scheduler. ``make`` makes an engine.
    """
    tables = {
        "seed": seed,
        "optimizer_steps": steps,
        "cluster": {"accelerators": engines + 1, "generation_accelerators": engines},
        "scheduler": {"train_batch_size": batch, "generation_batch_size": slots, **scheduler},
        "workload": {
            "group_size": group_size,
            "prompt_tokens": prompt_tokens,
            "success_rate": success_rate,
            "length": length,
        },
        "hardware": {"decode": {"kind": "affine", "step_s": 1.0}, "training": {"token_s": 0.0}, **(hardware or {})},
    }
    if environment is not None:
        tables["environment"] = environment
    if generation is not None:
        tables["generation"] = generation
    if fleet is not None:
        tables["fleet"] = fleet
    if faults is not None:
        tables["faults"] = faults
    if tables["scheduler"].get("kind") == "conventional":
        tables["cluster"] = {"accelerators": engines}
    return Played(parse_run(tables), engine_factory=make)


def environment(*, count, turns=3, context_max=10**6, observation=0, **keys):
    """Environments whose rollouts all have ``turns`` turns, with observations of ``observation`` tokens."""
    table = {"kind": "lognormal", "mean": turns, "max": turns, "context_max": context_max}
    return {
        "count": count,
        "turns": {**table, "observation_tokens": observation, "observation_max": observation},
        **keys,
    }


def uniform(longest):
    return {"kind": "uniform", "max": longest}


def fixed(length):
    return {"kind": "fixed", "max": length}


def trains_in(seconds):
    """Hardware whose optimizer steps all take these seconds."""
    return {"training": {"token_s": 0.0, "step_s": seconds}}


def oldest_trained(run):
    """Largest lag of any trained token, from the spans that engines reported."""
    finished = {entry.rollout_id: entry.spans for _, entry in run.of(RolloutFinished)}
    return max(
        entry.version - finished[rollout_id].versions[0]
        for _, entry in run.of(StartTraining)
        for rollout_id in entry.rollout_ids
    )
