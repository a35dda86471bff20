"""All that an implementer of a backend must offer, and the values that cross.

A *backend* makes the parts of a real run: engines, a trainer, a reference model and a codec. The driver knows nothing
else of them. ``contract/`` checks every promise made here; what passes it is a backend. ``vllm/`` and ``deepspeed/``
keep the promises for real (``vllm_deepspeed.py`` puts them together), ``fake.py`` keeps them in memory. All calls on
engines, trainer and reference model are coroutines: the driver waits for many at a time.

======================  ==================================================================================
``Backend``             checks a run file, then makes the parts of the run
``Codec``               text to tokens and back
``Engine``              generates answers; loads new weights between two decode steps
``Trainer``             trains on micro-batches, makes optimizer steps, publishes weights
``Reference``           log-probabilities of finished answers under the model at the start
``Sender, Receiver``    only where weights are sent through a group of processes: the trainer's and an engine's part
======================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.facts import SelfTest
from backends.workers import Launch, LocalWorker
from pipelinerl.config.run import RunConfig
from pipelinerl.records.reports import DecodeSteps
from pipelinerl.rl.segments import Segment, behaviour_logprobs, generated_tokens
from pipelinerl.scheduler.events import EngineSeconds, VersionSpans, WeightUpdate

# Legend of shapes: T generated tokens of one answer; P tokens of one prompt.

TRANSFER_ATTEMPTS = 2
"""Times weights are transferred until an engine that refuses them is lost; trainer and engines count alike."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One answer to be generated."""

    rollout_id: int
    prompt_tokens: tuple[int, ...]
    """The prompt, and the tokens that earlier requests of this rollout have generated, and what it observed."""
    max_new_tokens: int
    """Length at which generation is cut (tokens)."""
    seed: int
    """Seed of this request's sampling: the same request gives the same tokens on any engine of one version."""
    temperature: float
    """Softmax temperature; 0: the likeliest token."""
    top_p: float = 1.0
    """The likeliest words that have this probability together can be sampled (no unit). 1: all."""
    top_k: int = 0
    """So many of the likeliest words can be sampled (count). 0: all."""
    min_p: float = 0.0
    """Words this much less likely than the likeliest cannot be sampled (ratio of probabilities). 0: all can."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the tokens that make them are in it."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The answer of an engine to one request."""

    tokens_T: NDArray[np.int64]
    """Generated tokens, the end token included if there is one."""
    logprob_T: NDArray[np.float32]
    """Log-probability of each in the distribution that it was sampled from (nats)."""
    spans: VersionSpans
    """Which weight version sampled which token, as the engine reports it; ends at T."""
    aborted: bool
    """Whether it ended early, by ``abort`` or by an update of kind ``abort``."""
    front_end_s: float = 0.0
    """Time that the engine's front end has been busy with requests since its start (seconds); 0: not known."""
    decode_steps: DecodeSteps | None = None
    """Of the engine, since its answer before. None: not known."""
    seconds: EngineSeconds | None = None
    """Where the time of this request has gone on the engine. None: not known."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A published version of the weights."""

    version: int
    """Optimizer steps done."""
    location: str
    """Where engines find it: a file, or what they have been sent through a group of processes."""
    checksums: dict[str, str] = field(default_factory=dict)
    """Of what is sent: in a file SHA-256 of each parameter by Hugging Face name; through a group one for all."""


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Parts of the time that an engine stood still for an update (seconds)."""

    pause_s: float
    """Until the running decode step had ended."""
    transfer_s: float
    """Until the new weights were in place."""
    resume_s: float
    """Until it generated again."""

    @property
    def total_s(self) -> float:
        """All of it (seconds)."""
        return self.pause_s + self.transfer_s + self.resume_s


class Engine(Protocol):
    """An inference engine: H sequences in progress, continuous batching."""

    async def start(self) -> None:
        """Load the model, at version 0."""

    async def generate(self, request: GenerateRequest) -> Generated:
        """Generate one answer.

        Raises:
            EngineLostError: If the engine has died.
            BackendError: If this request cannot be answered.
        """

    async def abort(self, rollout_id: int) -> None:
        """End a request early: its ``generate`` returns with what it has. No effect if it has ended."""

    async def update(self, weights: Weights, weight_update: WeightUpdate) -> UpdateTimes:
        """Load new weights between two decode steps; tokens sampled from then on carry the new version.

        Under ``abort`` every ``generate`` in progress returns with what it has, before the new weights are in
        place; under ``keep`` and ``recompute`` they go on; ``wait`` is called when none is in progress.

        Raises:
            EngineLostError: If the engine cannot go on. It never serves a mixture of two versions.
            WeightsRefusedError: If they are not those of its model: the run ends.
        """

    async def checksums(self) -> dict[str, str]:
        """Return the checksums that the last update was verified against, by parameter."""

    async def sleep(self) -> None:
        """Give the memory up for training; nothing is in progress. Does nothing where memory is not shared."""

    async def wake(self) -> None:
        """Take the memory back."""

    async def shutdown(self) -> None:
        """End all processes; a second call does nothing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout to train on."""

    rollout_id: int
    prompt_P: NDArray[np.int64]
    """Prompt tokens; not trained on."""
    segments: tuple[Segment, ...]
    """The tokens after the prompt, at least one of them generated; generated ones are trained on."""
    reward: float
    """Reward of the answer. Paper symbol R."""
    advantage: float
    """Reward minus the group's leave-one-out baseline."""
    reference_logprob_T: NDArray[np.float32] | None = None
    """Log-probability of each generated token under the model at the start, at the same temperature (nats). None: not
    computed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all that follows it (count)."""
        return len(self.prompt_P) + sum(len(one.tokens) for one in self.segments)

    @property
    def answer_T(self) -> NDArray[np.int64]:  # noqa: N802  # shape letter
        """The generated tokens."""
        return generated_tokens(self.segments)

    @property
    def behaviour_logprob_T(self) -> NDArray[np.float32]:  # noqa: N802  # shape letter
        """Log-probability of each under the weights that sampled it (nats). Paper symbol: log mu."""
        return behaviour_logprobs(self.segments)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Results of one micro-batch."""

    logprob_T: list[NDArray[np.float32]]
    """Per sample, in order: log-probability of each answer token under the policy being trained, before the
    optimizer step (nats). Paper symbol: log pi."""
    metrics: dict[str, float]
    """Numbers to log. Those that end in ``loss``, ``_sum`` or ``_s`` add up over the micro-batches of a step: losses
    divided by the batch, ``entropy_sum`` (nats) over ``answer_tokens_sum`` tokens, ``flop_sum``, and seconds of every
    rank by phase. Of those that end in ``_gb`` the largest counts. After the optimizer step also ``gradient_norm``,
    ``learning_rate``, and ``skipped``: 1 if the gradient was not finite and the weights stayed as they were, else 0."""


class Reference(Protocol):
    """The model at the start, frozen: what a policy is kept near to."""

    async def start(self) -> None:
        """Load the model; after a loss, start again.

        Raises:
            ReferenceLostError: If it cannot be loaded.
        """

    async def logprobs(self, samples: list[Sample]) -> list[NDArray[np.float32]]:
        """Return the log-probability of each answer token, per sample, in order, shape [T] (nats).

        Rewards, advantages and behaviour log-probabilities of the samples are not read.

        Raises:
            ReferenceLostError: If the model has died, failed or hangs; ``shutdown`` and ``start`` may help.
        """

    async def shutdown(self) -> None:
        """End all processes; a second call does nothing."""


class Trainer(Protocol):
    """A data-parallel trainer: some ranks, one optimizer."""

    async def start(self) -> None:
        """Load the model, at version 0, or what ``load`` is given."""

    async def train(self, samples: list[Sample], *, completes_step: bool) -> TrainResult:
        """Accumulate the gradient of some rollouts; make the optimizer step if they complete the batch.

        The gradient of an optimizer step is the sum over its tokens divided by ``train_batch_size`` sequences,
        however it was cut into micro-batches, packed into rows and split over ranks.

        Raises:
            TrainerLostError: If a rank has died.
        """

    async def publish(self, version: int) -> Weights:
        """Make the weights ready to be sent; nothing is trained meanwhile.

        They stay as they are until the next ``publish``, whatever is trained meanwhile, unless they are not kept
        (``GroupMembers.standing_still``): then what is sent are the weights at that time.
        """

    async def send(self, weights: Weights) -> None:
        """Bring the weights to where engines load them from; what is trained meanwhile goes on.

        Nothing to do where ``location`` is a file; where weights cross a group of processes, its members have received
        and verified them when this has returned. Engines are updated after it.

        Raises:
            TransferError: If an engine was lost, does not answer, or refuses what it received, time and again. The
                others are well.
            TrainerLostError: If a rank has died.
        """

    async def snapshot(self) -> None:
        """Copy weights, optimizer and schedule, for ``save``; nothing is trained meanwhile."""

    async def save(self, folder: Path) -> None:
        """Write what ``snapshot`` copied last into a new folder; what is trained meanwhile goes on.

        No snapshot is made before it has returned.
        """

    async def load(self, folder: Path) -> None:
        """Go on from what ``save`` wrote."""

    async def export(self, folder: Path) -> None:
        """Write the model in Hugging Face format, tokenizer included, into a new folder."""

    async def offload(self) -> None:
        """Give the memory up for generation. Does nothing where memory is not shared."""

    async def reload(self) -> None:
        """Take the memory back."""

    async def shutdown(self) -> None:
        """End all processes; a second call does nothing."""


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens of a prompt."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of an answer, without the end token."""


class Sender(Protocol):
    """The trainer's part in a group of processes that weights are sent through."""

    async def open_group(self) -> str:
        """Leave the group of before; return what members of a new one have to know to join it."""

    async def join_group(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Join the new group; returns when all members have joined.

        Args:
            names: What its members are called: the sender, then all workers of all engines.
            timeout_s: Longest wait for them, now and in every transfer (seconds).

        Raises:
            TransferError: If they do not.
        """

    async def send(self, weights: Weights) -> None:
        """Send to all members; return when they have the weights, verified, else raise ``TransferError``."""

    async def abort_group(self, meeting: str, why: str) -> None:
        """Have what is under way in this group, and in no later one, raise at once, with this reason."""


class Receiver(Protocol):
    """An engine's part in it."""

    num_started: int
    """Times it was started: afterwards it is in no group."""

    async def join_group(self, meeting: str, *, first_worker: int) -> None:
        """Begin to join a group, and leave that of before; the sender knows when all have joined.

        Args:
            meeting: What ``Sender.open_group`` returned.
            first_worker: Number of this engine's first worker among all: 1 and the workers before.

        Raises:
            EngineLostError: If the engine does not answer.
        """

    async def until_lost(self) -> None:
        """Wait until the engine is lost, whoever finds it; another start makes it another engine."""


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of such a group."""

    sender: Sender
    """The trainer."""
    receivers: Mapping[int, Receiver]
    """All engines of the run, by engine id."""
    workers_each: int = 1
    """Workers of an engine (count)."""
    timeout_s: float = 600.0
    """Longest wait for a member (seconds)."""
    standing_still: bool = False
    """Whether what is sent is loaded at once, not kept: engines and trainer stand still while it is sent."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one run, none of them started; the driver starts them and shuts them down."""

    engines: Mapping[int, Engine]
    """By engine id, which events and commands name: 0 to ``config.num_engines`` - 1."""
    trainer: Trainer
    """The trainer."""
    codec: Codec
    """Text to tokens and back."""
    reference: Reference | None = None
    """The model at the start; there if ``loss.kl_coefficient`` is above 0."""
    group: GroupMembers | None = None
    """Trainer and engines where weights are sent through a group; None: weights lie where engines find them."""
    lost: Callable[[], str | None] | None = None
    """Says what all parts need and is gone, if something is; called again and again, in a thread. None: nothing."""
    self_test: Callable[[int, str | None], Awaitable[SelfTest]] | None = None
    """Measures, once all parts are up, links with so many bytes and whether all see a file. None: there is nothing."""
    launch: Launch = LocalWorker.launched
    """Starts processes of environments and of rewards, here or on other machines."""


class Backend(Protocol):
    """Makes the parts of a run from its run file."""

    def check(self, config: RunConfig) -> None:
        """Check that a run can begin, as far as one can tell without starting or writing anything.

        Args:
            config: What is to be run; ``config.train`` is there.

        Raises:
            ConfigError: If a package is missing, the model cannot be used, or a setting does not fit.
        """

    def open(self, config: RunConfig, *, logs: Path | None = None) -> AbstractContextManager[Parts]:
        """Return the parts of a run that has been checked; leaving the context gives back all that they stand on.

        Args:
            config: What is to be run; ``config.train`` is there.
            logs: Folder for what the processes of the parts print; it need not be there. None: it is not kept.

        Raises:
            ConfigError: If the machines have not what the run needs.
        """
