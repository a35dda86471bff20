"""The keys of a run file: one strict model per table. ``run_file`` reads and writes them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pipelinerl.config.compare import CompareConfig
from pipelinerl.config.environment import EnvironmentConfig
from pipelinerl.config.plan import PlanConfig
from pipelinerl.config.policy import PolicyConfig
from pipelinerl.config.price import PriceConfig
from pipelinerl.config.scheduler import SchedulerConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.config.workload import WorkloadConfig
from pipelinerl.hardware.tables import HardwareConfig
from pipelinerl.rl.drift import DriftModel
from pipelinerl.util.limits import MOST_ROLLOUTS, Accelerators, Count
from pipelinerl.util.strict_model import StrictModel


class ClusterConfig(StrictModel):
    """Number of accelerators and their division between generation and training."""

    accelerators: Accelerators
    """Accelerators in all (count). Paper symbol N."""
    generation_accelerators: Accelerators | None = None
    """Accelerators that generate (count); the others train. Paper symbol I. Not read by conventional and
    partial_rollouts, which generate and train on all of them in turn."""
    tensor_parallel: Accelerators = 1
    """Accelerators of one engine (count)."""


class RunConfig(StrictModel):
    """One run: the root of the run file."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random stream. The same seed gives the same bytes in simulation."""
    optimizer_steps: Count
    """Optimizer steps to make (count)."""
    cluster: ClusterConfig
    """Number of accelerators and their division between generation and training."""
    scheduler: SchedulerConfig
    """The schedule of generation and training."""
    workload: WorkloadConfig
    """Prompts, answers and rewards."""
    environment: EnvironmentConfig | None = None
    """Environments, and the turns of rollouts. None: a rollout has one turn."""
    hardware: HardwareConfig
    """Speed of the cluster."""
    policy: PolicyConfig | None = None
    """A small policy that gives the answers and learns. With it the simulator reads no key of ``workload`` but
    ``group_size`` and ``length.max``, and of ``environment.turns`` only ``max`` and ``context_max``: prompts, lengths,
    turns and rewards are those of the policy and its task."""
    drift: DriftModel | None = None
    """How fast importance weights spread with lag (``pipelinerl drift`` fits it): the summary then has a band of the
    effective sample size, labelled as modelled."""
    price: PriceConfig | None = None
    """What an hour costs: ``simulate``, ``compare`` and ``plan`` then tell money."""
    compare: CompareConfig | None = None
    """The runs of ``compare``."""
    plan: PlanConfig | None = None
    """The search space of ``plan``."""
    train: TrainConfig | None = None
    """Settings of ``train``: model, task, optimizer. Hardware by name reads its ``trainer`` and ``transport``."""

    @property
    def num_engines(self) -> int:
        """Engines that generate (count)."""
        return self.generation_accelerators // self.cluster.tensor_parallel

    @property
    def generation_accelerators(self) -> int:
        """Accelerators that generate (count): N if colocated, else I."""
        if self.colocated:
            return self.cluster.accelerators
        assert self.cluster.generation_accelerators is not None  # checked by the validator
        return self.cluster.generation_accelerators

    @property
    def training_accelerators(self) -> int:
        """Accelerators that train (count): N if colocated, else N - I."""
        if self.colocated:
            return self.cluster.accelerators
        return self.cluster.accelerators - self.generation_accelerators

    @property
    def least_max_lag(self) -> int:
        """Largest lag that some batch has whatever happens (optimizer steps); a run shorter than that has none."""
        return min(self.scheduler.schedule.least_lag(self.scheduler), self.optimizer_steps - 1)

    @property
    def longest_rollout_tokens(self) -> int:
        """Longest rollout, prompt included, as far as the run file says (tokens).

        How long the prompts of a length source or of a policy's task are, only these know (``sim.workload``).
        """
        if self.environment is not None:
            return self.environment.turns.context_max
        elsewhere = self.policy is not None or self.workload.length.kind == "empirical"
        return self.workload.length.max + (0 if elsewhere else self.workload.prompt_tokens)

    @property
    def room_tokens(self) -> int:
        """Longest rollout, prompt included, that engines and trainer of a real run have room for (tokens)."""
        assert self.train is not None  # the caller has seen to it
        if self.environment is not None:
            return self.environment.turns.context_max
        return self.train.task.max_prompt_tokens + self.workload.length.max

    @property
    def room_key(self) -> str:
        """The keys that ``room_tokens`` is the sum of, for messages."""
        one_turn = "train.task.max_prompt_tokens + workload.length.max"
        return one_turn if self.environment is None else "environment.turns.context_max"

    @property
    def longest_answer_tokens(self) -> int:
        """Most tokens that a rollout can generate, in all its turns (tokens)."""
        longest, environment = self.workload.length.max, self.environment
        return longest if environment is None else min(longest * environment.turns.max, environment.turns.context_max)

    @property
    def colocated(self) -> bool:
        """Whether the same accelerators generate and train in turn."""
        return self.scheduler.schedule.colocated

    @property
    def num_slots(self) -> int:
        """Rollouts in progress on all engines, at most (count)."""
        return self.num_engines * self.scheduler.generation_batch_size

    @property
    def rl_step_rollouts(self) -> int:
        """Rollouts of an RL step, or of an optimizer step where there is none (count)."""
        scheduler = self.scheduler
        return scheduler.train_batch_size * (
            scheduler.optimizer_steps_per_rl_step if scheduler.schedule.has_rl_steps else 1
        )

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_cluster()
        self._check_batches()
        self._check_rollouts()
        self._check_max_lag()
        self._check_plan()
        self._check_longest()
        self._check_environment()
        self._check_step_tokens()
        return self

    def _check_cluster(self) -> None:
        cluster, scheduler = self.cluster, self.scheduler
        if self.colocated and self.hardware.generation_gpu is not None:
            raise ValueError(
                "hardware.generation_gpu needs a schedule whose engines have accelerators of their own, got "
                f"scheduler.kind={scheduler.kind!r}, which generates and trains on the same ones; kind='pipeline' with "
                "max_lag=0 lets two pools wait for each other"
            )
        if not self.colocated:
            if cluster.generation_accelerators is None:
                raise ValueError(
                    f"cluster.generation_accelerators is missing; scheduler.kind={scheduler.kind!r} needs it"
                )
            if cluster.generation_accelerators >= cluster.accelerators:
                raise ValueError(
                    "cluster.generation_accelerators must be below cluster.accelerators, got "
                    f"generation_accelerators={cluster.generation_accelerators}, accelerators={cluster.accelerators}"
                )
        if self.generation_accelerators % cluster.tensor_parallel:
            raise ValueError(
                f"cluster.tensor_parallel must divide the {self.generation_accelerators} accelerators that generate, "
                f"got tensor_parallel={cluster.tensor_parallel}"
            )

    def _check_batches(self) -> None:
        scheduler, group = self.scheduler, self.workload.group_size
        batch = scheduler.train_batch_size
        if batch % group:
            raise ValueError(
                "scheduler.train_batch_size must be a multiple of workload.group_size, got "
                f"train_batch_size={batch}, group_size={group}"
            )
        micro = scheduler.micro_batch
        if batch % micro or micro % group:
            raise ValueError(
                "scheduler.micro_batch_size must divide train_batch_size and be a multiple of group_size, got "
                f"micro_batch_size={micro}, train_batch_size={batch}, group_size={group}"
            )
        if scheduler.filter_no_signal and group == 1:
            raise ValueError(
                "scheduler.filter_no_signal needs workload.group_size of at least 2, since one reward alone has no "
                "signal, got filter_no_signal=true, group_size=1"
            )
        if scheduler.ready_queue_limit < batch:
            raise ValueError(
                "scheduler.ready_queue_size must be at least train_batch_size, got "
                f"ready_queue_size={scheduler.ready_queue_limit}, train_batch_size={batch}"
            )

    def _check_plan(self) -> None:
        if self.plan is not None and self.plan.environments is not None and self.environment is None:
            raise ValueError(f"plan.environments needs a table [environment], got {self.plan.environments}")
        if self.plan is not None and self.plan.min_ess is not None and self.drift is None:
            raise ValueError(
                "plan.min_ess needs a [drift] table, which says how fast weights drift (`pipelinerl drift` fits one), "
                f"got min_ess={self.plan.min_ess:g}"
            )
        for size in (self.plan and self.plan.train_batch_size) or ():
            if size % self.workload.group_size:
                raise ValueError(
                    "plan.train_batch_size must hold multiples of workload.group_size, got "
                    f"{size}, group_size={self.workload.group_size}"
                )

    def _check_longest(self) -> None:
        """Raise ValueError if the KV cache is given and one rollout does not fit into it."""
        capacity, longest = self.hardware.kv_cache_tokens, self.longest_rollout_tokens
        if capacity is not None and longest > capacity:
            prompt = "workload.prompt_tokens + " if longest > self.workload.length.max else ""
            key = f"{prompt}workload.length.max" if self.environment is None else "environment.turns.context_max"
            raise ValueError(
                f"hardware.kv_cache_tokens must hold the longest rollout, {key} = {longest} tokens, "
                f"got kv_cache_tokens={capacity}"
            )

    def _check_step_tokens(self) -> None:
        """Raise ValueError if a step cannot hold a token of each sequence."""
        most, sequences = self.hardware.step_tokens, self.scheduler.generation_batch_size
        if most is not None and most < sequences:
            raise ValueError(
                f"hardware.step_tokens must be at least scheduler.generation_batch_size={sequences}, got {most}"
            )

    def _check_environment(self) -> None:
        """Raise ValueError if no rollout fits into its context."""
        if self.environment is None:
            return
        context, prompt = self.environment.turns.context_max, self.workload.prompt_tokens
        if context <= prompt:
            raise ValueError(
                f"environment.turns.context_max must be above workload.prompt_tokens={prompt}, got {context}"
            )
        if prompt + self.environment.turns.max > context:  # a turn has a token at least
            raise ValueError(
                f"environment.turns.max must leave a token a turn in context_max={context} after "
                f"workload.prompt_tokens={prompt}, got {self.environment.turns.max}"
            )

    def _check_rollouts(self) -> None:
        """Raise ValueError if more rollouts could be there at once than memory holds."""
        scheduler, engines = self.scheduler, self.num_engines
        if self.num_slots > MOST_ROLLOUTS:
            raise ValueError(
                f"scheduler.generation_batch_size must give all engines at most {MOST_ROLLOUTS} sequences together, "
                f"got generation_batch_size={scheduler.generation_batch_size} on {engines} engines"
            )
        if self.rl_step_rollouts > MOST_ROLLOUTS:
            raise ValueError(
                f"scheduler.optimizer_steps_per_rl_step must give an RL step at most {MOST_ROLLOUTS} sequences, got "
                f"optimizer_steps_per_rl_step={self.rl_step_rollouts // scheduler.train_batch_size}, "
                f"train_batch_size={scheduler.train_batch_size}"
            )

    def _check_max_lag(self) -> None:
        """Raise ValueError if some batch has a larger lag whatever happens."""
        scheduler, least, why = self.scheduler, self.least_max_lag, self.scheduler.schedule.least_lag_reason
        if scheduler.max_lag is not None and scheduler.max_lag < least:
            raise ValueError(f"scheduler.max_lag cannot be met: {why} = {least}, got max_lag={scheduler.max_lag}")
