"""The keys of a run file: one strict model per table, for both worlds. ``runfile`` reads and writes them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipelinerl.config.plan import PlanConfig
from pipelinerl.config.policy import PolicyConfig
from pipelinerl.config.train import TrainConfig
from pipelinerl.hardware.coefficients import Level, checked_coefficients
from pipelinerl.rl.drift import DriftModel
from pipelinerl.scheduler.events import OnFull, OnStale, WeightUpdate
from pipelinerl.util.strict_model import StrictModel


class ClusterConfig(StrictModel):
    """How many accelerators there are and who uses them."""

    accelerators: int = Field(ge=1)
    """Accelerators in all (count). Paper symbol N."""
    generation_accelerators: int | None = Field(default=None, ge=1)
    """Accelerators that generate under the schedulers pipeline and one_step_off (count); the others train. Paper
    symbol I. The conventional scheduler generates and trains on all of them in turn and does not read this."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Accelerators of one engine (count)."""


class SchedulerConfig(StrictModel):
    """What the scheduler needs; no hardware, no paths."""

    kind: Literal["pipeline", "conventional", "one_step_off"] = "pipeline"
    """``pipeline`` (Algorithm 2: in-flight updates), ``conventional`` (Algorithm 1: generate, then train) or
    ``one_step_off`` (generate the rollouts of the next RL step while this one trains)."""
    train_batch_size: int = Field(ge=1)
    """Sequences per optimizer step (count). Paper symbol B."""
    generation_batch_size: int = Field(ge=1)
    """Sequences in progress per engine, at most (count). Paper symbol H."""
    optimizer_steps_per_rl_step: int = Field(default=1, ge=1)
    """Optimizer steps per RL step (count), conventional and one_step_off only. Paper symbol G."""
    publish_every: int = Field(default=1, ge=1)
    """Optimizer steps from one publication to the next (count), pipeline only."""
    partial_rollouts: bool = False
    """Conventional only: an RL step begins as soon as enough rollouts are ready; the unfinished ones stand still,
    go on after it on a KV cache computed again, and are trained on later. ``weight_update`` is not read."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences the trainer starts on as soon as they are ready (count). None: the whole batch at once."""
    max_lag: int | None = Field(default=None, ge=0)
    """Largest lag of any trained token, in optimizer steps. None: unbounded."""
    weight_update: WeightUpdate = Field(default=WeightUpdate.KEEP, strict=False)
    """What happens to rollouts in progress when new weights arrive."""
    on_stale: OnStale = Field(default=OnStale.TRAIN, strict=False)
    """How ``max_lag`` is kept: by waiting (train), or by discarding (drop, requeue)."""
    ready_queue_size: int | None = Field(default=None, ge=1)
    """Finished rollouts that may wait for the trainer (sequences). None: 2 B."""
    on_full: OnFull = Field(default=OnFull.WAIT, strict=False)
    """What happens when the ready queue is full."""
    filter_no_signal: bool = False
    """Discard groups whose rewards are all equal, and start others in their place."""
    discard_limit: int = Field(default=1_000_000, ge=1)
    """Rollouts discarded, aborted or failed between two optimizer steps before the run counts as stalled (count)."""

    @property
    def ready_queue_limit(self) -> int:
        """Finished rollouts that may wait for the trainer (sequences)."""
        return self.ready_queue_size if self.ready_queue_size is not None else 2 * self.train_batch_size

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch (count)."""
        return self.micro_batch_size if self.micro_batch_size is not None else self.train_batch_size


class LengthConfig(StrictModel):
    """How many tokens the answers have."""

    kind: Literal["fixed", "uniform", "lognormal", "empirical"]
    """``fixed``: always ``max``. ``uniform``: 1 .. ``max``. ``lognormal``: ``mean`` and ``cv``, cut at ``max``.
    ``empirical``: whole groups of real answers from ``source``, scaled to ``mean``, cut at ``max``."""
    max: int = Field(ge=1)
    """Longest answer, where generation is cut (tokens). Paper symbol L."""
    mean: float | None = Field(default=None, gt=0)
    """Mean length after the cut (tokens): needed by lognormal; empirical: None keeps the lengths of the source."""
    cv: float | None = Field(default=None, gt=0)
    """Standard deviation over mean before the cut (no unit), lognormal only."""
    source: str | None = None
    """Empirical only: the name of a shipped set, or the path of a CSV file (relative to the run file)."""
    growth: float = Field(default=1.0, gt=0)
    """Factor on all lengths at the last optimizer step, reached linearly from 1 at the first (no unit)."""

    @model_validator(mode="after")
    def _kind_has_what_it_needs(self) -> Self:
        if self.kind == "lognormal":
            for name in ("mean", "cv"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is missing; kind='lognormal' needs mean and cv")
        if self.kind == "empirical" and self.source is None:
            raise ValueError("source is missing; kind='empirical' needs the name of a shipped set or a CSV file")
        if self.kind in ("lognormal", "empirical") and self.mean is not None and self.mean >= self.max:
            raise ValueError(f"mean must be below max, got mean={self.mean:g}, max={self.max}")
        return self


class WorkloadConfig(StrictModel):
    """What is generated: prompts, answers, rewards."""

    group_size: int = Field(default=1, ge=1)
    """Rollouts per prompt (count)."""
    prompt_tokens: int = Field(default=0, ge=0)
    """Length of every prompt (tokens); a length source that has its own prompt lengths is not asked for them."""
    success_rate: float = Field(default=0.5, ge=0, le=1)
    """Probability that a rollout is rewarded with 1 and not 0, where the length source does not say."""
    length: LengthConfig
    """Lengths of the answers."""


class UtilisationDecode(StrictModel):
    """The paper's appendix A: a step of h sequences costs h/U(h) flashes, whatever their context."""

    kind: Literal["utilisation"]
    flash_s: float = Field(gt=0)
    """Seconds of one flash: least time for one token on one accelerator, FLOPs per token / peak FLOP/s (eq. 9)."""
    table: str | None = None
    """CSV file with columns ``batch,utilisation`` measured by the user. None: the curve fitted to the paper."""


class AffineDecode(StrictModel):
    """A decode step costs step_s + sequence_s * b + context_token_s * (context tokens of all b sequences)."""

    kind: Literal["affine"]
    step_s: float = Field(gt=0)
    """Seconds per step, whatever it holds."""
    sequence_s: float = Field(default=0.0, ge=0)
    """Seconds per step and sequence."""
    context_token_s: float = Field(default=0.0, ge=0)
    """Seconds per step and token of context."""


class RooflineDecode(StrictModel):
    """max(read the weights, multiply) + read the KV cache + overhead, from the figures of GPU and model."""

    kind: Literal["roofline"]
    peak_flops: float = Field(gt=0)
    """Dense peak of one accelerator (FLOP/s)."""
    bandwidth: float = Field(gt=0)
    """Memory bandwidth of one accelerator (bytes/s)."""
    parameters_read: float = Field(gt=0)
    """Parameters read in every step: all but the input embedding and the routed experts (count)."""
    parameters_active: float = Field(gt=0)
    """Parameters that multiply for one token (count)."""
    bytes_per_parameter: float = Field(default=2.0, gt=0)
    """Bytes of one weight."""
    kv_bytes_per_token: float = Field(ge=0)
    """Bytes of KV cache per token of context: 2 * layers * KV heads * head size * bytes."""
    experts: int | None = Field(default=None, ge=1)
    """Routed experts of one layer (count), of which a step reads those that a sequence of its batch goes through.
    None: there are none."""
    experts_per_token: int | None = Field(default=None, ge=1)
    """Routed experts that a token goes through in one layer (count)."""
    expert_parameters: float | None = Field(default=None, gt=0)
    """Parameters of the routed experts of all layers together (count)."""
    weight_efficiency: float = Field(default=0.72, gt=0, le=1)
    """Share of the bandwidth reached while reading weights (no unit)."""
    kv_efficiency: float = Field(default=0.75, gt=0, le=1)
    """Share of the bandwidth reached while reading the KV cache (no unit)."""
    flops_efficiency: float = Field(default=0.7, gt=0, le=1)
    """Share of the peak reached by the matrix products (no unit)."""
    step_overhead_s: float = Field(default=1.2e-3, ge=0)
    """Seconds per step of the engine itself."""
    sequence_overhead_s: float = Field(default=1.07e-5, ge=0)
    """Seconds per step and sequence of the engine itself."""

    @model_validator(mode="after")
    def _units_are_plausible(self) -> Self:
        for name, unit, example in (("peak_flops", "FLOP/s", "989e12"), ("bandwidth", "bytes/s", "3.35e12")):
            if not 1e9 <= (value := getattr(self, name)) <= 1e18:
                raise ValueError(f"{name} must be from 1e+09 to 1e+18 {unit}, got {value:g}; did you mean {example}?")
        return self

    @model_validator(mode="after")
    def _experts_are_complete(self) -> Self:
        names = ("experts", "experts_per_token", "expert_parameters")
        missing = [name for name in names if getattr(self, name) is None]
        if 0 < len(missing) < len(names):
            raise ValueError(f"{missing[0]} is missing; experts, experts_per_token and expert_parameters go together")
        if self.experts is not None and self.experts_per_token is not None and self.experts_per_token > self.experts:
            raise ValueError(
                "experts_per_token must be at most experts, got "
                f"experts_per_token={self.experts_per_token}, experts={self.experts}"
            )
        return self


Decode = Annotated[UtilisationDecode | AffineDecode | RooflineDecode, Field(discriminator="kind")]


class PrefillConfig(StrictModel):
    """Seconds to fill the KV cache of one sequence of n tokens: sequence_s + token_s * n + token_squared_s * n^2."""

    sequence_s: float = Field(default=0.0, ge=0)
    """Seconds per sequence."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds per token."""
    token_squared_s: float = Field(default=0.0, ge=0)
    """Seconds per squared token (attention)."""


class TrainingConfig(StrictModel):
    """Seconds of training: per optimizer step, per micro-batch, and per token over the accelerators that train.

    With ``sequence_accelerators`` a micro-batch lasts as long as its fullest rank (docs/hardware.md has the bound).
    """

    token_s: float = Field(ge=0)
    """Accelerator-seconds per token, prompt tokens included. Paper symbol tau (there in flashes)."""
    token_squared_s: float = Field(default=0.0, ge=0)
    """Accelerator-seconds per squared token of a sequence, prompt included (attention)."""
    step_s: float = Field(default=0.0, ge=0)
    """Seconds per optimizer step, whatever it holds."""
    micro_batch_s: float = Field(default=0.0, ge=0)
    """Seconds per micro-batch, whatever it holds."""
    sequence_accelerators: int | None = Field(default=None, ge=1)
    """Accelerators that share one sequence, a rank of the trainer (count): 1 under ZeRO. A micro-batch lasts at least
    as long as one rank needs for its longest sequence. None: all accelerators share all tokens evenly, however few."""


class WeightTransferConfig(StrictModel):
    """Seconds between an optimizer step and engines that sample with its weights."""

    publish_s: float = Field(default=0.0, ge=0)
    """Seconds the trainer stands still to publish."""
    transfer_s: float = Field(default=0.0, ge=0)
    """Seconds from the publication until the weights are at the engines, which go on generating meanwhile."""
    pause_s: float = Field(default=0.0, ge=0)
    """Seconds an engine stands still, between two decode steps, to load them."""


class PhaseSwitchConfig(StrictModel):
    """Seconds in which colocated accelerators do neither: conventional only."""

    to_training_s: float = Field(default=0.0, ge=0)
    """Seconds from the end of generation to the start of training (offload the engine, load the trainer)."""
    to_generation_s: float = Field(default=0.0, ge=0)
    """Seconds from the end of publishing to the start of generation."""


class LatencyConfig(StrictModel):
    """Seconds that pass outside engines and trainer."""

    dispatch_s: float = Field(default=0.0, ge=0)
    """Seconds from the scheduler's decision to the arrival of a rollout at its engine, at least."""
    dispatch_jitter_s: float = Field(default=0.0, ge=0)
    """Mean of the exponential delay on top of ``dispatch_s``, drawn per rollout (seconds)."""
    reward_s: float = Field(default=0.0, ge=0)
    """Seconds to score a finished rollout."""
    preprocess_s: float = Field(default=0.0, ge=0)
    """Seconds to prepare a scored rollout for training (reference log-probabilities, packing)."""


class HardwareConfig(StrictModel):
    """How fast the cluster is. Read by the simulator only.

    With ``gpu`` and ``model`` every table that is not given is derived (``pipelinerl.hardware.derive``).
    """

    gpu: str | None = None
    """Accelerator: a name of the catalogue, or a TOML file of your own (relative to the run file)."""
    model: str | None = None
    """Language model: a name of the catalogue, a TOML file of your own, or a Hugging Face ``config.json``."""
    level: Level = Field(default=Level.CENTRAL, strict=False)
    """Which value of every coefficient the derived tables use."""
    coefficients: dict[str, float] = {}
    """Coefficients that replace those of the level, by name."""
    decode: Decode | None = None
    """One decode step of an engine. None: derived from gpu and model."""
    prefill: PrefillConfig | None = None
    """Filling the KV cache of a prompt. None: derived, or free."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """KV-cache capacity of one engine (tokens). None: derived from gpu and model, or unlimited without them."""
    training: TrainingConfig | None = None
    """The trainer's step. None: derived from gpu and model."""
    weights: WeightTransferConfig | None = None
    """The way of the weights. None: derived, or free."""
    switch: PhaseSwitchConfig | None = None
    """The phase switch of colocated accelerators. None: derived, or free."""
    latency: LatencyConfig = LatencyConfig()
    """Everything else that takes time."""

    @property
    def by_name(self) -> bool:
        """Whether tables that are not given are derived from gpu and model."""
        return self.gpu is not None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.gpu is None) != (self.model is None):
            missing, given = ("gpu", "model") if self.gpu is None else ("model", "gpu")
            raise ValueError(f"{missing} is missing; hardware.{given} needs it")
        for name in ("decode", "training"):
            if not self.by_name and getattr(self, name) is None:
                raise ValueError(f"{name} is missing")
        if self.coefficients and not self.by_name:
            raise ValueError("coefficients are read only with hardware.gpu and hardware.model, which are missing")
        checked_coefficients(self.level, self.coefficients)
        return self


class ResolvedHardware(HardwareConfig):
    """Hardware of which every table is given as numbers: what the simulator reads."""

    decode: Decode
    """One decode step of an engine."""
    prefill: PrefillConfig
    """Filling the KV cache of a prompt."""
    training: TrainingConfig
    """The trainer's step."""
    weights: WeightTransferConfig
    """The way of the weights."""
    switch: PhaseSwitchConfig
    """The phase switch of colocated accelerators."""


class Variant(StrictModel):
    """A named list of overrides, each as after ``--set``."""

    name: str = Field(min_length=1)
    """What tables and figures call it."""
    set: list[str] = []
    """Overrides ``a.b=value``."""


class CompareConfig(StrictModel):
    """What ``compare`` runs: every arm in every scenario."""

    arms: list[Variant] = Field(min_length=1)
    """The schedulers to compare."""
    scenarios: list[Variant] = [Variant(name="as given")]
    """The circumstances to compare them in: hardware coefficients, length tails."""
    baseline: str
    """Name of the arm that speed-ups refer to."""
    seeds: list[Annotated[int, Field(ge=0)]] = []
    """Every arm runs once with each of these seeds, in every scenario. None: once, with the seed of the run file."""

    @model_validator(mode="after")
    def _names_are_unique_and_known(self) -> Self:
        for what, variants in (("arms", self.arms), ("scenarios", self.scenarios)):
            names = [variant.name for variant in variants]
            if len(set(names)) < len(names):
                raise ValueError(f"{what} must have different names, got {names}")
        names = [arm.name for arm in self.arms]
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different, got {self.seeds}")
        if self.baseline not in names:
            raise ValueError(f"baseline must be the name of an arm, got {self.baseline!r}; allowed: {names}")
        return self


class RunConfig(StrictModel):
    """One run: the root of the run file."""

    seed: int = Field(default=0, ge=0)
    """Seed of every random stream. The same seed gives the same bytes in simulation."""
    optimizer_steps: int = Field(ge=1)
    """Optimizer steps to make (count)."""
    cluster: ClusterConfig
    """How many accelerators there are and who uses them."""
    scheduler: SchedulerConfig
    """When what is generated and trained."""
    workload: WorkloadConfig
    """What is generated."""
    hardware: HardwareConfig
    """How fast the cluster is."""
    policy: PolicyConfig | None = None
    """A small policy that gives the answers and learns. With it the simulator reads no key of ``workload`` but
    ``group_size`` and ``length.max``: prompts, lengths and rewards are those of the policy and its task."""
    drift: DriftModel | None = None
    """How fast importance weights spread with lag (``pipelinerl drift`` fits it): the summary then has a band of the
    effective sample size, labelled as modelled."""
    compare: CompareConfig | None = None
    """What ``compare`` runs."""
    plan: PlanConfig | None = None
    """What ``plan`` searches."""
    train: TrainConfig | None = None
    """What ``train`` needs: model, task, optimizer. Hardware by name reads ``trainer`` of it, if the table is there."""

    @property
    def num_engines(self) -> int:
        """Engines that generate (count)."""
        return self.generation_accelerators // self.cluster.tensor_parallel

    @property
    def generation_accelerators(self) -> int:
        """Accelerators that generate (count): N for conventional, else I."""
        if self.scheduler.kind == "conventional":
            return self.cluster.accelerators
        assert self.cluster.generation_accelerators is not None  # the validator has seen to it
        return self.cluster.generation_accelerators

    @property
    def training_accelerators(self) -> int:
        """Accelerators that train (count): N for conventional, else N - I."""
        if self.scheduler.kind == "conventional":
            return self.cluster.accelerators
        return self.cluster.accelerators - self.generation_accelerators

    @property
    def least_max_lag(self) -> int:
        """Largest lag that some batch has whatever happens (optimizer steps); a run shorter than that has none."""
        scheduler = self.scheduler
        steps = {
            "conventional": scheduler.optimizer_steps_per_rl_step,
            "one_step_off": 2 * scheduler.optimizer_steps_per_rl_step,
            "pipeline": scheduler.publish_every,
        }[scheduler.kind]
        return min(steps, self.optimizer_steps) - 1

    @property
    def longest_rollout_tokens(self) -> int:
        """Longest rollout, prompt included, as far as the run file tells (tokens).

        How long the prompts of a length source or of a policy's task are, only these know (``sim.workload``).
        """
        elsewhere = self.policy is not None or self.workload.length.kind == "empirical"
        return self.workload.length.max + (0 if elsewhere else self.workload.prompt_tokens)

    @property
    def colocated(self) -> bool:
        """Whether the same accelerators generate and train in turn."""
        return self.scheduler.kind == "conventional"

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        cluster, scheduler, group = self.cluster, self.scheduler, self.workload.group_size
        batch = scheduler.train_batch_size
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
        self._check_max_lag()
        if scheduler.partial_rollouts and not self.colocated:
            raise ValueError(
                "scheduler.partial_rollouts needs scheduler.kind='conventional', got partial_rollouts=true, "
                f"kind={scheduler.kind!r}"
            )
        if scheduler.partial_rollouts and scheduler.max_lag is not None and scheduler.on_stale is not OnStale.TRAIN:
            raise ValueError(
                "scheduler.on_stale must be 'train' with partial_rollouts=true and max_lag, got "
                f"on_stale={scheduler.on_stale.value!r}"
            )
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
        capacity, longest = self.hardware.kv_cache_tokens, self.longest_rollout_tokens
        if capacity is not None and longest > capacity:
            prompt = "workload.prompt_tokens + " if longest > self.workload.length.max else ""
            raise ValueError(
                f"hardware.kv_cache_tokens must hold the longest rollout, {prompt}workload.length.max = {longest} "
                f"tokens, got kv_cache_tokens={capacity}"
            )
        return self

    def _check_max_lag(self) -> None:
        """Raise ValueError if some batch has a larger lag whatever happens."""
        scheduler, least = self.scheduler, self.least_max_lag
        why = {
            "conventional": "a conventional RL step trains its last batch at lag optimizer_steps_per_rl_step - 1",
            "one_step_off": "a one_step_off RL step trains its last batch at lag 2 * optimizer_steps_per_rl_step - 1",
            "pipeline": "the last batch before a publication is trained at a lag of at least publish_every - 1",
        }[scheduler.kind]
        if scheduler.max_lag is not None and scheduler.max_lag < least:
            raise ValueError(f"scheduler.max_lag cannot be met: {why} = {least}, got max_lag={scheduler.max_lag}")
