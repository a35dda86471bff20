"""A new weight transport is one file: this one. It is simulated, planned and trained with, and no package names it.

*A shelf*: rank 0 puts its weights on a shelf that all engines see; trainer and engines stand still for a second each.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pages import EXAMPLES

import pipelinerl as prl
from backends.interface import Weights
from backends.transfer.transport import SenderContext, TransportEnds, WeightSource, ends_of, place_of
from pipelinerl.config.resolve import resolved_hardware
from pipelinerl.config.run import RunConfig, load_run
from pipelinerl.errors import BackendError, ConfigError
from pipelinerl.hardware.transport import FILE, HostShare, Route, WeightTransferConfig, WeightTransport
from pipelinerl.records.run_folder import TRACE_FILE
from pipelinerl.records.trace import Trace
from pipelinerl.scheduler.events import WeightsLoaded
from sim.planning.answer import plan
from sim.planning.simulate import HowToPlan
from sim.run import simulate


def seconds(route: Route) -> WeightTransferConfig:
    carried_s = route.num_bytes / route.coefficients.file_bandwidth
    return WeightTransferConfig(publish_s=1.0, transfer_s=1.0 + carried_s, pause_s=1.0)


def host_bytes(host: HostShare) -> float:
    return host.sends * host.num_bytes


TO_BE_SENT: dict[int, dict[str, Any]] = {}
SHELF: dict[str, dict[str, Any]] = {}


class Sender:
    def __init__(self, context: SenderContext) -> None:
        assert context.receives

    def publish(self, source: WeightSource, version: int) -> Weights:
        TO_BE_SENT[version] = {name: weight.copy() for part in source.buckets() for name, weight in part.items()}
        return Weights(version, f"{SHELVED.name}:{version}", {"steps": str(TO_BE_SENT[version]["steps"])})

    def send(self, version: int) -> str | None:
        SHELF[str(version)] = TO_BE_SENT.pop(version)
        return None

    def close(self) -> None:
        SHELF.clear()


class Receiver:
    loads: ClassVar[list[int]] = []

    def __init__(self, model_path: str) -> None:
        """Needs no model."""

    def join(self, member: Any) -> None:
        raise AssertionError("there is no group")

    def receive(self, weights: Weights) -> Iterable[tuple[str, Any]]:
        tensors = SHELF[place_of(weights, SHELVED)]
        if str(tensors["steps"]) != weights.checksums["steps"]:
            raise BackendError("weights on the shelf are others")
        return tensors.items()

    def loaded(self, weights: Weights) -> None:
        self.loads.append(weights.version)

    def close(self) -> None:
        """Keeps nothing."""


ENDS = TransportEnds(Sender, Receiver)
SHELVED = WeightTransport(
    name="shelved",
    description="weights on a shelf that all engines see",
    seconds=seconds,
    coefficients=("file_bandwidth",),
    host_bytes=host_bytes,
    ends="test_new_transport:ENDS",
)
NAMED = "test_new_transport:SHELVED"
"""Its name in run files, for processes with this folder on their path."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put this folder on the path, as a user's would be."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


def by_name(*overrides: str) -> RunConfig:
    return load_run(EXAMPLES / "h100_by_name.toml", (f"hardware.weight_sync={NAMED}", "optimizer_steps=4", *overrides))


def test_it_is_simulated_by_its_own_seconds_and_replayed(tmp_path: Path) -> None:
    config = by_name()
    weights = resolved_hardware(config).weights
    assert (weights.publish_s, weights.pause_s) == (1.0, 1.0)
    faster = resolved_hardware(by_name("hardware.coefficients.file_bandwidth=1e12")).weights
    assert 1.0 < faster.transfer_s < weights.transfer_s
    simulate(config, out=tmp_path / "run", trace=True)
    assert prl.replay(tmp_path / "run").difference is None
    again = load_run(tmp_path / "run" / "run.toml")
    assert again.hardware.sync_method is not None
    assert again.hardware.sync_method.name == "shelved"


@pytest.mark.slow
def test_it_is_planned() -> None:
    search = ("plan.schedulers=['pipeline', 'conventional']", "plan.generation_batch_size=[64]", "plan.simulate=2")
    result = plan(by_name(*search, "plan.simulate_steps=8"), HowToPlan(workers=1))
    assert result.recommended is not None
    assert result.sensitivity


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's
def test_it_brings_weights_from_a_trainer_to_engines_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # TensorBoard's writer is torch's
    from in_memory import Letters, config_of

    from backends.fake import FakeBackend
    from backends.owner import driving
    from backends.run import drive

    config = config_of(steps=6, train={"transport": NAMED})
    with FakeBackend().open(config) as parts, driving(tmp_path / "run") as lock:
        summary = drive(config, parts=parts, task=Letters(), lock=lock)
    assert summary.optimizer_steps == 6
    named = importlib.import_module(NAMED.partition(":")[0])
    events = [record.event for record in Trace(tmp_path / "run" / TRACE_FILE).records()]
    loaded = {event.version for event in events if isinstance(event, WeightsLoaded)}
    assert loaded
    assert loaded <= set(named.Receiver.loads)  # the last one may still be on its way
    assert prl.replay(tmp_path / "run").difference is None


def test_a_location_of_another_transport_is_refused() -> None:
    with pytest.raises(BackendError, match="location must begin with shelved:, got file:3"):
        ENDS.receiver("").receive(Weights(3, "file:3"))


NO_TRANSPORT: Any = len
OURS = "must be file, broadcast, delta or package.module:ATTRIBUTE, got"


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("hardware.weight_sync", "broadcast", r"got 'broadcast'; did you mean full_broadcast\?"),
        ("hardware.weight_sync", "reshardd", r"got 'reshardd'; did you mean reshard\?"),
        ("train.transport", "broadcasts", rf"{OURS} 'broadcasts'; did you mean broadcast\?"),
        ("train.transport", "reshard", f"{OURS} 'reshard'"),
        ("train.transport", "no_such_module:TRANSPORT", "must be importable"),
        ("train.transport", "test_new_transport:NO_TRANSPORT", "must name a WeightTransport, got"),
        ("hardware.weight_sync", "test_new_transport:NO_TRANSPORT", "must name a WeightTransport, got"),
    ],
)
def test_a_wrong_name_of_a_transport_is_one_clear_line(key: str, name: str, message: str) -> None:
    example = EXAMPLES / ("h100_by_name.toml" if key.startswith("hardware") else "tiny_arithmetic.toml")
    with pytest.raises(ConfigError, match=f"{key} .*{message}") as error:
        load_run(example, (f"{key}={json.dumps(name)}",))
    assert len(str(error.value).splitlines()) == 1


def test_ends_are_found_by_their_name() -> None:
    assert ends_of(SHELVED.ends) is not None
    with pytest.raises(ConfigError, match="must name a TransportEnds, got 'test_new_transport:NO_TRANSPORT'"):
        ends_of("test_new_transport:NO_TRANSPORT")
    assert FILE.ends == "backends.transfer.file:FILE"
