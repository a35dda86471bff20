"""The two ends of a weight transport: the trainer's, one on every rank, and the engine's, one in every worker.

A transport's module here defines both and names them in a ``TransportEnds``, which ``WeightTransport.ends`` points to;
its seconds, memory and facts are in ``pipelinerl/hardware/transport.py``. Importing this module loads no torch.

==================  ==================================  ===========================================================
call                who                                 when
==================  ==================================  ===========================================================
``publish``         all ranks together                  after an optimizer step; the trainer stands still
``join``            every worker, if ``grouped``        when the group's members change; returns at once
``send``            rank 0, beside training             after ``publish``; not called if ``in_folder``
``receive``         every worker                        after ``send``; its engine stands still
``loaded``          every worker                        all that ``receive`` yielded is in the model
==================  ==================================  ===========================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from backends.interface import Weights
from pipelinerl.errors import BackendError, ConfigError
from pipelinerl.hardware.transport import WeightTransport
from pipelinerl.util.user_code import named_attribute

Tensors = Mapping[str, Any]
"""By name in the checkpoint."""
Parameters = Sequence[tuple[str, str, Sequence[int]]]
"""Name, type (``float32``) and shape of each parameter, in the order in which they cross."""


class WeightSource(Protocol):
    """The weights of the policy, as its ranks have them."""

    @property
    def device(self) -> Any:
        """Where ``buckets`` yields (``torch.device``)."""

    @property
    def parameters(self) -> Parameters:
        """All parameters, part by part."""

    def buckets(self, *, everywhere: bool = False) -> Iterator[Tensors]:
        """Yield the weights in parts, at least a layer each, in the order of ``parameters``; all ranks together.

        Empty but on rank 0, unless ``everywhere``.
        """


@dataclass(frozen=True, slots=True)
class SenderContext:
    """The parts of the trainer that a sender depends on."""

    receives: bool
    """Whether this is rank 0, which has all weights."""
    folder: Path
    """The run's own part of ``train.weights_folder``; it may not exist."""
    group: Any
    """The ``group.GroupHost`` that a ``grouped`` transport sends to."""


class WeightSender(Protocol):
    """The trainer's end on one rank."""

    def publish(self, source: WeightSource, version: int) -> Weights | None:
        """Make the weights ready; they stay as they are until the next call.

        Their ``location`` begins with the transport's name and a colon. None on other ranks than 0.
        """

    def send(self, version: int) -> str | None:
        """Bring the newest published weights to all engines; return the fault, if any. The rank is well either way."""

    def close(self) -> None:
        """Free the published weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A worker's place in a group."""

    rendezvous: str
    """Address, port and password of the sender."""
    worker: int
    """Number among all, from 1."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of every parameter of the model by name."""
    device: Any
    """``torch.device`` of the engine."""
    timeout_s: float
    """Longest wait for the others."""


class WeightReceiver(Protocol):
    """The engine's end in one worker."""

    def join(self, member: Membership) -> None:
        """Begin to join a group and leave the previous one; the sender learns when all have joined."""

    def receive(self, weights: Weights) -> Iterable[tuple[str, Any]]:
        """Yield the verified parameters of a version; all are taken before any is loaded, and keep their values.

        ``BackendError`` if they are incomplete, or not these weights; ``OSError`` if the sender has gone.
        """

    def loaded(self, weights: Weights) -> None:
        """Free the parameters; ``BackendError`` if they have changed."""

    def close(self) -> None:
        """Leave the group and free the received weights; a second call does nothing."""


@runtime_checkable
class DeltaReceiver(WeightReceiver, Protocol):
    """A receiver that may also know what has changed."""

    def delta(self, weights: Weights, held: Weights) -> Any:
        """Return the ``delta.Delta`` that turns weights which a model holds into these; None if it is not known."""


@dataclass(frozen=True, slots=True)
class TransportEnds:
    """Makers of both ends of a transport."""

    sender: Callable[[SenderContext], WeightSender]
    """A rank's end."""
    receiver: Callable[[str], WeightReceiver]
    """A worker's end, from the folder of the model."""


def ends_of(ends: str) -> TransportEnds:
    """Return the value that ``WeightTransport.ends`` names; ``ConfigError`` if there is none."""
    found = named_attribute(ends, key="WeightTransport.ends", allowed="package.module:ATTRIBUTE")
    if not isinstance(found, TransportEnds):
        raise ConfigError(f"WeightTransport.ends must name a TransportEnds, got {ends!r}")
    return found


def place_of(weights: Weights, transport: WeightTransport) -> str:
    """Return ``location`` after the transport's name; ``BackendError`` if another one has published the weights."""
    name, _, place = weights.location.partition(":")
    if name != transport.name:
        raise BackendError(f"location must begin with {transport.name}:, got {weights.location}")
    return place


# -------------------------------------------------------------- weights of another model: no repetition can help

LACK, UNKNOWN, SHAPE = "lack", "have unknown", "have a wrong shape in"


class WeightMismatchError(BackendError):
    """Names or shapes differ from the model's."""


DAMAGED, REFUSED = "its snapshot is damaged", "was refused"


def is_refusal(failure: str) -> bool:
    """Return whether a transfer failed by the bytes of the weights: the same ones will fail again."""
    return DAMAGED in failure or REFUSED in failure


def is_mismatch(failure: str) -> bool:
    """Return whether the text of an error, all that vLLM or a member passes on, is of a ``WeightMismatchError``."""
    return re.search(rf" ({LACK}|{UNKNOWN}|{SHAPE}) \d+ of \d+ parameters: ", failure) is not None
