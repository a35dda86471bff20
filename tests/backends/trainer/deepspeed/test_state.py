"""The state of ranks in the types of GPUs: steps are AdamW's on float32 masters; saved, loaded, resized to the bit."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")

from own_memory import own_bytes  # noqa: E402
from tiny_trainer import (  # noqa: E402
    MARKS,
    OPTIMIZER,
    ROUNDING,
    STEPS,
    largest_difference,
    parameters,
    path_of,
    plain_gradients,
    plain_training,
    samples,
    saved_state,
    settings,
    spoilt_rows,
    started,
    train,
)

from backends.trainer.deepspeed.rank import (  # noqa: E402
    DeepSpeedRank,
    deepspeed_config,
    split,
)
from backends.trainer.model import TRAINED_DTYPES, load_policy  # noqa: E402
from backends.trainer.packing import pack  # noqa: E402
from backends.trainer.state import fill_policy  # noqa: E402
from backends.trainer.step import learning_rate_factor  # noqa: E402
from backends.transfer.file import read_verified  # noqa: E402
from backends.transfer.rendezvous import reserved_port  # noqa: E402
from backends.transfer.verify import checkpoint_shapes  # noqa: E402
from pipelinerl.config.train import TrainerConfig  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402
from pipelinerl.rl.config import LossConfig  # noqa: E402

pytestmark = MARKS
SPLIT = (1, 2, 3)
"""ZeRO's stages in which a rank has a part of the state."""
BIG = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
"""A model of 105 MB in bfloat16, whose largest parameters have 2 MB."""
EXPERTS = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "n_group": 1, "topk_group": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "first_k_dense_replace": 1,
}  # fmt: skip
"""One of 94 MB, whose experts, 75 MB, are fused while they are loaded, the largest into parameters of 17 MB."""


@pytest.fixture
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on CPU in the types of GPUs."""
    monkeypatch.setitem(TRAINED_DTYPES, "cpu", torch.bfloat16)


def saved(rank: DeepSpeedRank, folder: Path) -> dict[str, dict[str, Any]]:
    rank.snapshot()
    rank.save(folder)
    return saved_state(folder)


def check_same(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> None:
    assert sorted(left) == sorted(right) == ["exp_avg", "exp_avg_sq", "master"]
    for kind, by_name in left.items():
        assert largest_difference(by_name, right[kind]) == 0, kind


def check_adamw(
    model_path: Path, rows: list[Any], before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], *, step: int
) -> None:
    """Check that a step is AdamW's on the masters, in float64, but for roundings of float32.

    A gradient is a sum of at most 16 rows, in whatever order: wrong by at most 2^-20 of their sizes. Its norm is that
    of 75,000 numbers, and may be wrong by 2^-18. Everything else is a handful of float32 operations, 2^-24 each.
    """
    gradients, sizes = plain_gradients(model_path, before["master"], rows)
    beta1, beta2, decay = OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.weight_decay
    rate = OPTIMIZER.learning_rate * learning_rate_factor(OPTIMIZER, optimizer_steps=STEPS)(step)
    for name, gradient in gradients.items():
        old, new = ({kind: state[kind][name].double() for kind in state} for state in (before, after))
        error = 2.0**-18 * sizes[name].double()
        mean = beta1 * old["exp_avg"] + (1 - beta1) * gradient.double()
        square = beta2 * old["exp_avg_sq"] + (1 - beta2) * gradient.double() ** 2
        assert ((new["exp_avg"] - mean).abs() <= (1 - beta1) * error + 2.0**-22 * mean.abs() + 1e-30).all(), name
        of_square = (1 - beta2) * (2 * gradient.abs() * error + error**2)
        assert ((new["exp_avg_sq"] - square).abs() <= of_square + 2.0**-22 * square + 1e-30).all(), name
        # From the rank's own moments: an error of a tiny gradient may turn its update round.
        unbiased = new["exp_avg"] / (1 - beta1 ** (step + 1)), new["exp_avg_sq"] / (1 - beta2 ** (step + 1))
        update = rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        master = old["master"] * (1 - rate * decay) - update
        assert ((new["master"] - master).abs() <= 2.0**-21 * (master.abs() + update.abs()) + 1e-12).all(), name


def check_rounded(rank: DeepSpeedRank, state: dict[str, dict[str, Any]]) -> None:
    """Check that the parameters are the masters, rounded to bfloat16."""
    for name, parameter in parameters(rank).items():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.view(-1), state["master"][f"policy.{name}"].bfloat16()), name


@pytest.mark.parametrize("zero_stage", SPLIT)
def test_steps_in_bfloat16_are_adamws_on_float32_masters_and_one_that_is_not_finite_changes_no_bit(
    model_path: Path, tmp_path: Path, zero_stage: int, bfloat16: None
) -> None:
    rank = started(model_path, zero_stage=zero_stage)
    before = saved(rank, tmp_path / "0")
    for step in range(3):
        (rows,) = pack(samples(step), pack_tokens=100, num_ranks=1)
        rank.train(rows, completes_step=True)
        after = saved(rank, tmp_path / str(step + 1))
        check_adamw(model_path, rows, before, after, step=step)
        check_rounded(rank, after)
        assert rank.train(spoilt_rows(), completes_step=True)[1]["skipped"] == 1
        before = saved(rank, tmp_path / "skipped")
        check_same(before, after)
        check_rounded(rank, before)


@pytest.mark.parametrize(("dtype", "zero_stage"), [(torch.float32, 0), *((torch.bfloat16, stage) for stage in SPLIT)])
def test_going_on_from_a_checkpoint_is_the_same_as_never_having_stopped(
    model_path: Path, tmp_path: Path, dtype: Any, zero_stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is trained between the snapshot and its file."""
    monkeypatch.setitem(TRAINED_DTYPES, "cpu", dtype)
    with_value = LossConfig(value_coefficient=0.5)
    straight, resumed = (started(model_path, zero_stage=zero_stage, loss=with_value) for _ in range(2))
    for step in range(2):
        train(straight, samples(step))
    straight.snapshot()
    went_on = [train(straight, samples(step))[1] for step in range(2, STEPS)]
    ((name, digest),) = straight.save(tmp_path / "checkpoint").items()
    assert digest == hashlib.sha256((tmp_path / "checkpoint" / name).read_bytes()).hexdigest()
    resumed.load(tmp_path / "checkpoint")
    check_same(saved(resumed, tmp_path / "again"), saved_state(tmp_path / "checkpoint"))
    assert went_on == [train(resumed, samples(step))[1] for step in range(2, STEPS)]
    assert largest_difference(parameters(straight), parameters(resumed)) == 0
    check_same(saved(straight, tmp_path / "straight"), saved(resumed, tmp_path / "resumed"))


def test_a_run_that_was_made_longer_goes_on_with_the_rate_of_its_own_schedule(model_path: Path, tmp_path: Path) -> None:
    first, longer = started(model_path), started(model_path, optimizer_steps=2 * STEPS)
    for step in range(STEPS):
        train(first, samples(step))
    saved(first, tmp_path / "end")
    longer.load(tmp_path / "end")
    factor = learning_rate_factor(OPTIMIZER, optimizer_steps=2 * STEPS)
    rates = [train(longer, samples(step))[1]["learning_rate"] for step in (STEPS, STEPS + 1)]
    assert rates == [OPTIMIZER.learning_rate * factor(step) for step in (STEPS, STEPS + 1)]


def test_another_stage_goes_on_from_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    """One that keeps its small parameters whole, as DeepSpeed does by default."""
    first = started(model_path, zero_stage=0)
    other = started(model_path, zero_stage=3, whole_parameter_elements=100_000)
    train(first, samples())
    train(other, samples(7))
    state = saved(first, tmp_path / "first")
    other.load(tmp_path / "first")
    check_same(saved(other, tmp_path / "other"), state)
    assert largest_difference(parameters(other), parameters(first)) == 0


# ----------------------------------------------------------------------------------------------- two ranks


def _in_float32(rank: int, port: int, model_path: Path, zero_stage: int, *, sharing: int = 1) -> Any:
    """Make three steps as one of two ranks; return the first rank's published weights and the last metrics."""
    trainer = TrainerConfig(zero_stage=zero_stage, sequence_parallel=sharing)
    one = started(model_path, trainer=trainer, port=port, rank=rank, num_ranks=2)
    metrics: dict[str, float] = {}
    for step in range(3):
        batch = samples(step)
        for part in (batch[:1], batch[1:5], batch[5:]):  # the first leaves a rank without any
            rows = pack(part, pack_tokens=60, num_ranks=2 // sharing)[rank // sharing]
            _, metrics = one.train(rows, completes_step=part[-1] is batch[-1])
    weights = one.publish(3)
    whole = None
    if weights is not None:
        read = read_verified(path_of(weights), weights.checksums, checkpoint_shapes(model_path))
        whole = {name: tensor.numpy().copy() for name, tensor in read.items()}
    one.shutdown()
    return whole, metrics


def _resized(rank: int, port: int, model_path: Path, folder: Path, zero_stage: int) -> None:
    """Go on in bfloat16 from the state that one rank has saved, and save before and after a step."""
    one = started(model_path, zero_stage=zero_stage, port=port, rank=rank, num_ranks=2)
    one.load(folder / f"one-{zero_stage}")
    for name in ("loaded", "trained"):
        one.snapshot()
        one.save(folder / f"{name}-{zero_stage}")
        one.train(pack(samples(2), pack_tokens=60, num_ranks=2)[rank], completes_step=True)
    one.shutdown()


def _loaded(model_path: Path) -> tuple[int, dict[str, Any]]:
    """Load a model under ZeRO-3; return the largest growth of this process's memory meanwhile, and biases."""
    peak, ended = list[int](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            peak.append(own_bytes())

    gc.collect()  # models have cycles: models loaded before must not go while this one comes
    before, watcher = own_bytes(), threading.Thread(target=watch)
    watcher.start()
    config = deepspeed_config(settings(model_path, num_ranks=2, trainer=TrainerConfig(zero_stage=3)))
    model = load_policy(str(model_path), device="cpu", split=partial(split, config=config))
    ended.set()
    watcher.join()
    half = sum(parameter.ds_tensor.nbytes for parameter in model.parameters())
    assert half > 45e6
    biases = {name: buffer.numpy() for name, buffer in model.named_buffers() if name.endswith("_bias")}
    return max(*peak, own_bytes()) - before, biases


def _one_of_two(rank: int, port: int, model_path: Path, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    for zero_stage in (0, *SPLIT):
        results.put((rank, _in_float32(rank, port, model_path, zero_stage)))
        if zero_stage != 1:
            results.put((rank, _in_float32(rank, port, model_path, zero_stage, sharing=2)))
        if not zero_stage:
            TRAINED_DTYPES["cpu"] = torch.bfloat16
            results.put((rank, (_loaded(folder / "big"), _loaded(folder / "experts"))))
            TRAINED_DTYPES["cpu"] = torch.float32
    TRAINED_DTYPES["cpu"] = torch.bfloat16
    for zero_stage in SPLIT:
        _resized(rank, port, model_path, folder, zero_stage)


@pytest.fixture(scope="module")
def of_two(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """What two ranks report, and the folder of what they and one rank before them have saved."""
    folder = tmp_path_factory.mktemp("resized")
    config = transformers.LlamaConfig(**BIG, num_attention_heads=8)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "big")  # in float32: every number is converted
    experts = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**EXPERTS)).bfloat16()
    for name, buffer in experts.named_buffers():
        buffer.data = torch.arange(8).float() if name.endswith("_bias") else buffer.data
    experts.save_pretrained(folder / "experts")
    with pytest.MonkeyPatch.context() as patch, reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        patch.setitem(TRAINED_DTYPES, "cpu", torch.bfloat16)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is free is given back, so that it is not counted
        for zero_stage in SPLIT:
            alone = started(model_path, zero_stage=zero_stage)
            for step in range(2):
                train(alone, samples(step))
            saved(alone, folder / f"one-{zero_stage}")
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        ranks = [context.Process(target=_one_of_two, args=(rank, port, model_path, folder, results)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        try:
            reports: dict[int, list[Any]] = {0: [], 1: []}
            for _ in range(2 * 8):
                rank_number, report = results.get(timeout=900)
                reports[rank_number].append(report)
            for rank in ranks:
                rank.join(timeout=900)
            assert [rank.exitcode for rank in ranks] == [0, 0]
        finally:
            for rank in ranks:
                rank.kill()
        yield SimpleNamespace(folder=folder, loaded=[reports[rank].pop(2) for rank in (0, 1)], steps=reports[0])


def test_two_ranks_make_the_step_of_plain_adamw(model_path: Path, of_two: SimpleNamespace) -> None:
    expected, steps = plain_training(model_path, 3)
    assert len(of_two.steps) == 7  # of four stages, and of three with shared rows
    for whole, metrics in of_two.steps:
        named = {name: torch.tensor(whole[name]) for name in expected}
        assert largest_difference(named, expected) < ROUNDING
        assert metrics["gradient_norm"] == pytest.approx(steps[-1]["gradient_norm"], rel=1e-4)


@pytest.mark.parametrize("zero_stage", SPLIT)
def test_two_ranks_go_on_from_one_and_one_from_two(
    model_path: Path, tmp_path: Path, zero_stage: int, of_two: SimpleNamespace, bfloat16: None
) -> None:
    one, loaded, trained = (
        saved_state(of_two.folder / f"{name}-{zero_stage}") for name in ("one", "loaded", "trained")
    )
    check_same(loaded, one)
    rows = [row for of_rank in pack(samples(2), pack_tokens=60, num_ranks=2) for row in of_rank]
    check_adamw(model_path, rows, loaded, trained, step=2)
    alone = started(model_path, zero_stage=zero_stage)
    alone.load(of_two.folder / f"trained-{zero_stage}")
    check_same(saved(alone, tmp_path / "alone"), trained)
    check_rounded(alone, trained)
    merged = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    fill_policy(merged, of_two.folder / f"trained-{zero_stage}")
    assert largest_difference(merged.state_dict(), parameters(alone)) == 0
    (rows,) = pack(samples(3), pack_tokens=100, num_ranks=1)
    alone.train(rows, completes_step=True)
    check_adamw(model_path, rows, trained, saved(alone, tmp_path / "further"), step=3)


def test_no_rank_has_the_model_whole_in_memory_under_zero_3(of_two: SimpleNamespace) -> None:
    """Each of two has its half of 105 MB, parameters of 2 MB one at a time, and what libraries keep for themselves."""
    peaks = [peak for (peak, _), _ in of_two.loaded]
    assert all(52e6 < peak < 63e6 for peak in peaks), peaks


def test_experts_that_are_fused_are_whole_on_rank_0_only_and_others_have_its_biases(of_two: SimpleNamespace) -> None:
    """The second rank has its half of 94 MB and a parameter of 17 MB at a time; the first all experts besides."""
    (first, _), (second, biases) = (experts for _, experts in of_two.loaded)
    assert second < 47e6 + 17e6 + 10e6 < first, (first, second)
    assert len(biases) == 3
    assert all(bias.tolist() == list(range(8)) for bias in biases.values())


# ------------------------------------------------------------------------------------------------ messages


def test_what_is_missing_in_a_checkpoint_is_named(model_path: Path, tmp_path: Path) -> None:
    rank = started(model_path)
    with pytest.raises(BackendError, match=r"^checkpoint cannot be loaded: .*nothing has no rank_\*.safetensors$"):
        rank.load(tmp_path / "nothing")
    saved(started(model_path), tmp_path / "other")
    other = started(model_path, loss=LossConfig(value_coefficient=0.5))
    with pytest.raises(BackendError, match=r"^checkpoint cannot be loaded: .*other lacks master of value_head.weight$"):
        other.load(tmp_path / "other")


def test_a_checkpoint_that_cannot_be_written_is_named(model_path: Path, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    rank = DeepSpeedRank(settings(model_path))
    rank._state = SimpleNamespace(write=fail)
    with pytest.raises(BackendError, match=f"cannot write {tmp_path}: OSError: .*No space left"):
        rank.save(tmp_path)
