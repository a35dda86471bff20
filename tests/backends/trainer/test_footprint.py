"""Memory of a trainer: of its GPUs, counted without one, and of its machines; runs that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from character_model import make_model  # noqa: E402
from model_configs import ARCHITECTURES  # noqa: E402
from refusals import message  # noqa: E402
from torch.profiler import profile  # noqa: E402

from backends.interface import Share  # noqa: E402
from backends.trainer import footprint as module  # noqa: E402
from backends.trainer.attention import register_packed_attention  # noqa: E402
from backends.trainer.footprint import (  # noqa: E402
    LiveBytes,
    check_host_memory,
    check_memory,
    check_trainable,
    footprint,
    host_memory,
    of_deepspeed,
    of_fsdp2,
    on_meta,
    pack_activations,
    recomputed_layers,
    shape_of,
)
from backends.trainer.model import PolicyModel, load_policy  # noqa: E402
from backends.trainer.publish import Publisher  # noqa: E402
from backends.trainer.state import Piece, RankState  # noqa: E402
from backends.transfer import row as shared_row  # noqa: E402
from pipelinerl.config.run import load_run  # noqa: E402
from pipelinerl.errors import BackendError  # noqa: E402
from pipelinerl.hardware.catalogue import find_model  # noqa: E402
from pipelinerl.hardware.coefficients import coefficients  # noqa: E402
from pipelinerl.hardware.derive import training_memory  # noqa: E402
from pipelinerl.hardware.transport import BROADCAST  # noqa: E402

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen7b_128_h100.toml"
SMALL = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen7b() -> Any:
    return transformers.AutoConfig.for_model(**ARCHITECTURES["Qwen2.5-7B"][0])


def run(*changed: str) -> Any:
    return load_run(EXAMPLE, list(changed))


def test_live_bytes_are_of_the_tensors_that_live() -> None:
    known = torch.zeros(100)
    with LiveBytes([known]) as live:
        first = torch.ones(10) + known[:10]  # 40 bytes, and 40 for the ones until they go
        second = first.view(2, 5)[0]
        assert (live.now, live.peak) == (40, 80)
        del first
        assert live.now == 40
        del second
        assert live.now == 0


@pytest.mark.slow
def test_a_7b_without_checkpointing_of_activations_is_refused_with_the_key_and_the_figure(qwen7b: Any) -> None:
    """Activations: 108.9 GB by a count of its own, with all logits; without them (5.0 GB) 103.9, and 4.2 GB more in
    the backward pass; the weights of 28 layers, 13.1. Workspace: 5.3, and one part of 80 of the published weights, 0.2.
    Fused, 72.9 GB of layers (158,840 bytes a token in each), their weights, and 5.0 for the output layer: a chunk's
    logits 1.2, gradients of weights in float32 and of the chunk 3.3, hidden states and their gradients 0.5.
    """
    config = run("train.trainer.activation_checkpointing=false")
    assert "needs 98.1 GB a GPU (activations 91.0, states 1.7, workspace 5.5)" in message(check_memory, config, qwen7b)
    config = run("train.trainer.activation_checkpointing=false", "train.trainer.fused=false")
    says = message(check_memory, config, qwen7b)
    assert says.startswith("train.trainer.activation_checkpointing must be true, got activation_checkpointing=false: ")
    needs = "needs 128.3 GB a GPU (activations 121.1, states 1.7, workspace 5.5); of the 86 GB of hardware.gpu='H100'"
    assert needs in says


def test_the_7b_example_fits_as_it_is(qwen7b: Any) -> None:
    check_memory(run(), qwen7b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sets", "fitting", "begins", "has"),
    [
        (
            "train.trainer.activation_checkpointing=1", {"activation_checkpointing": True},
            "activation_checkpointing must be true, got activation_checkpointing=1: ", "; with it 0.1 GB",
        ),
        ("train.trainer.zero_stage=1", {"zero_stage": 3}, "zero_stage must be 3, got zero_stage=1", "; with it 0.1 GB"),
        ("train.trainer.pack_tokens=40000", {"pack_tokens": 30_000}, "pack_tokens must be at most 28466", ""),
        ("cluster.accelerators=49", {"pack_tokens": 5_000}, "pack_tokens must be smaller", "more GPUs"),
        (
            "train.trainer.pack_tokens=10000", {"pack_tokens": 5_000},
            "sequence_parallel must be 2 with pack_tokens=4608, zero_stage=3 and", "got sequence_parallel=1",
        ),
    ],
)  # fmt: skip
def test_the_key_to_change_is_the_one_that_helps(
    monkeypatch: pytest.MonkeyPatch, sets: str, fitting: dict[str, int], begins: str, has: str
) -> None:
    """A GPU that just holds a trainer with ``fitting``. 28466: the 10th of 16 steps of 1925 tokens from 9216."""
    config, small = run(sets), transformers.Qwen2Config(**SMALL)
    needed = footprint(config, small, **fitting).total
    monkeypatch.setattr(module, "_gpu_memory", lambda _: (needed / 0.899, "a small GPU"))
    says = message(check_memory, config, small)
    assert says.startswith(f"train.trainer.{begins}")
    assert has in says


def test_ranks_that_share_a_row_keep_the_attentions_output_twice() -> None:
    """As it was sent, and as it came back: 2 bytes for each of 128 numbers, of three layers.

    Four ranks also have two heads of 32 twice, of keys and of values.
    """
    small = transformers.Qwen2Config(**SMALL)
    alone, two, four = (
        pack_activations(on_meta(small, torch.bfloat16), 512, checkpointing=False, sequence_parallel=size)
        for size in (1, 2, 4)
    )
    assert two - alone == 512 * 2 * 3 * 128
    assert four - alone == 512 * 2 * 3 * (128 + 2 * 2 * 32)


def test_deltas_keep_each_ranks_part_of_the_published_weights() -> None:
    """2 bytes of a parameter, over 8 ranks."""
    small, ranks = transformers.Qwen2Config(**SMALL), ("cluster.accelerators=16", "cluster.generation_accelerators=8")
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    by = {
        transport: footprint(run(*ranks, f"train.transport={transport}"), small, pack_tokens=64)
        for transport in ("delta", "broadcast")
    }
    assert by["delta"].workspace - by["broadcast"].workspace == pytest.approx(2 * num / 8)


def recomputed(fused: bool) -> list[Any]:
    """Return what is needed, by the number of layers."""
    config, small = run("train.trainer.pack_tokens=500"), transformers.Qwen2Config(**SMALL)
    return [footprint(config, small, activation_checkpointing=number, fused=fused) for number in range(4)]


@pytest.fixture(scope="module")
def recomputing() -> list[Any]:
    return recomputed(fused=False)


def test_each_layer_that_is_not_recomputed_keeps_as_much_more(recomputing: list[Any]) -> None:
    """Numbers of a token: four hidden states, queries and attention's output, keys and values, and four in the
    feed-forward part, of 2 bytes; inputs of two norms in float32; of 4 bytes one sum for each of 4 heads and 2 norms;
    less the layer's input. Attention's kernel keeps 16 bytes, which draw its dropout. The layer's weights, gathered.
    Fused: three in the feed-forward part, and nothing in float32; with all recomputed another moment is the peak.
    """
    weights = 128 * (2 * 128 + 128 + 3 * 256 + 2) + 256
    for needs, feed_forward, exact, layers in ((recomputing, 4, 2 * 128, 3), (recomputed(fused=True)[:3], 3, 0, 2)):
        counts = [one.activations for one in needs]
        token = 2 * (4 * 128 + 2 * 128 + 2 * 64 + feed_forward * 256) + 4 * (exact + 4 + 2) - 2 * 128
        assert [before - after for before, after in pairwise(counts)] == [500 * token + 16 + 2 * weights] * layers


def test_no_more_layers_are_recomputed_than_memory_needs(
    monkeypatch: pytest.MonkeyPatch, recomputing: list[Any]
) -> None:
    """Where all memory is just enough for a number of layers, and where it lacks a millionth."""
    config, small = run("train.trainer.pack_tokens=500"), transformers.Qwen2Config(**SMALL)
    monkeypatch.setattr(module, "footprint", lambda *_, activation_checkpointing: recomputing[activation_checkpointing])
    needed = [one.total / coefficients(config.hardware.level).memory_share for one in recomputing]
    assert [recomputed_layers(config, small, memory * (1 + 1e-9)) for memory in needed] == [0, 1, 2, 3]
    assert [recomputed_layers(config, small, memory * (1 - 1e-6)) for memory in needed] == [1, 2, 3, 3]


def test_a_reference_model_has_its_weights_and_what_its_forward_pass_takes() -> None:
    """499 predicted tokens: logits in float32, and their softmax; hidden states, all and those; three sums."""
    small, tokens = transformers.Qwen2Config(**SMALL), ("train.trainer.pack_tokens=500", "train.trainer.fused=false")
    without, beside = (footprint(run(*tokens, f"train.loss.kl_coefficient={value}"), small) for value in (0, 0.1))
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    forward = 499 * 1000 * 8 + 2 * (500 + 499) * 128 + 499 * 3 * 4
    assert beside.workspace - without.workspace == pytest.approx(2 * num + forward, abs=1)
    assert beside.activations == without.activations


def test_a_teacher_has_its_own_weights(tmp_path: Path) -> None:
    """Three layers more than the pupil, each of its own size."""
    small, large = transformers.Qwen2Config(**SMALL), transformers.Qwen2Config(**SMALL | {"num_hidden_layers": 6})
    large.save_pretrained(tmp_path)
    sets = ("train.trainer.pack_tokens=500", "train.trainer.fused=false", "scheduler.filter_no_signal=false")
    taught = footprint(run(*sets, f"train.loss.teacher={tmp_path}"), small)
    beside = footprint(run(*sets, "train.loss.kl_coefficient=0.1"), small)
    assert taught.workspace - beside.workspace == 2 * 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256)


@pytest.mark.parametrize(("stage", "numbers"), [(1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 18 / 8)])
def test_states_are_of_mixed_precision(stage: int, numbers: float) -> None:
    """2 bytes of weights, 4 of gradients, 4 of master weights and 8 of moments for each parameter, on 8 ranks."""
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    config = run("cluster.accelerators=16", "cluster.generation_accelerators=8", f"train.trainer.zero_stage={stage}")
    assert footprint(config, transformers.Qwen2Config(**SMALL), pack_tokens=64).states == pytest.approx(numbers * num)


def test_adapters_alone_have_gradients_and_moments_and_travel() -> None:
    """Of rank 4 beside attention of 128 to 128 (queries, output) and 64 (keys, values), and feed-forwards of 256."""
    small, lora = transformers.Qwen2Config(**SMALL), ("train.lora.rank=4", "train.lora.alpha=8")
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    adapters = 3 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))
    sets = ("cluster.accelerators=16", "cluster.generation_accelerators=8", "train.trainer.zero_stage=2")
    config = run(*sets, *lora)
    assert footprint(config, small, pack_tokens=64).states == 2 * (num + adapters) + 16 * adapters / 8
    needs = host_memory(run_of_8("train.transport=broadcast", *lora), shape_of(small), WHOLE)
    assert (needs.weights, needs.checkpoint) == (2 * adapters, 12 * adapters)


def test_buckets_of_weights_count_where_they_are_more_than_the_activations() -> None:
    """The whole model: with ZeRO-3 it is gathered; for deltas a rank has a new part of 8, and its comparison."""
    small, ranks = transformers.Qwen2Config(**SMALL), ("cluster.accelerators=16", "cluster.generation_accelerators=8")
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    for transport, stage, times in (("delta", 3, 1.25), ("delta", 2, 0.25), ("broadcast", 3, 1), ("broadcast", 2, 0)):
        sets = f"train.transport={transport}", f"train.trainer.zero_stage={stage}"
        needs = footprint(run(*ranks, *sets), small, pack_tokens=64)
        assert needs.sending == times * 2 * num
        assert needs.total == needs.states + needs.workspace + max(needs.sending, needs.activations)
    assert needs.sending < needs.activations


def test_gradients_of_zero_2_are_collected_while_others_are_reduced() -> None:
    """A second bucket in the type of the weights: here of the whole model, of 2 bytes a number."""
    small = transformers.Qwen2Config(**SMALL)
    one, two = (footprint(run(f"train.trainer.zero_stage={stage}"), small, pack_tokens=64) for stage in (1, 2))
    num = 2 * 1000 * 128 + 3 * (128 * (2 * 128 + 128 + 3 * 256 + 2) + 256) + 128
    assert two.workspace - one.workspace == 2 * num


@pytest.mark.slow
@pytest.mark.parametrize(("recomputation", "below"), [(1.0, 0.05), (0.0, 0.16)])
def test_the_planners_formula_is_near(qwen7b: Any, recomputation: float, below: float) -> None:
    """It is for norms that keep half of the memory of transformers' norms, which weigh where activations are kept."""
    counted = pack_activations(on_meta(qwen7b, torch.bfloat16), 16_384, checkpointing=recomputation > 0)
    planned = training_memory(find_model("Qwen2.5-7B"), accelerators=80, recomputation=recomputation).activations
    assert (1 - below) * counted < planned < counted


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_counted_on_meta_is_allocated_on_a_device(checkpointing: bool) -> None:
    """Torch's profiler sees every allocation on CPU, also those within an operation."""
    config, tokens = transformers.Qwen2Config(**SMALL), 2000
    counted = pack_activations(on_meta(config, torch.float32), tokens, checkpointing=checkpointing)
    attention = register_packed_attention()
    policy = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with profile(profile_memory=True) as seen:
        pack_activations(policy, tokens, checkpointing=checkpointing)
    now = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert counted == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(**SMALL, head_dim=32),
        transformers.LlamaConfig(**SMALL),
        transformers.GemmaConfig(**SMALL, head_dim=32, tie_word_embeddings=True),
        transformers.Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
        transformers.Glm4MoeConfig(**SMALL, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_can_be_trained_are_counted(config: Any) -> None:
    check_trainable(config)
    kept, again = (
        pack_activations(on_meta(config, torch.bfloat16), 500, checkpointing=value) for value in (False, True)
    )
    assert again < kept


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.Gemma2Config(**SMALL, head_dim=32), "needs softcap, not supported"),
        (transformers.GraniteConfig(**SMALL, logits_scaling=8.0), "scaled, capped or biased besides, not supported"),
        (transformers.PhiConfig(**SMALL), "scaled, capped or biased besides, not supported"),
        (transformers.Qwen3NextConfig(**SMALL), "layers of linear_attention would mix them"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_that_the_trainer_would_compute_wrongly_are_refused(config: Any, says: str) -> None:
    assert says in message(check_trainable, config)


# ------------------------------------------------------------------------------------------- memory of the machines

LLAMA = transformers.LlamaConfig(**SMALL)
EXPERTS = transformers.Qwen3MoeConfig(
    **SMALL, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64
)
DENSE = 2 * 1000 * 128 + 128 + 3 * (3 * 128 * 128 + 2 * 128 + 3 * 128 * 256)
"""Parameters of ``LLAMA``."""
ROUTED = 3 * 8 * 3 * 128 * 64
"""Parameters of the experts, which are fused."""
WHOLE = Share("here", 1e12, workers=4, ranks=4, leads=True)


def run_of_8(*changed: str) -> Any:
    return run("cluster.accelerators=8", "cluster.generation_accelerators=4", *changed)


@pytest.mark.parametrize("shared", [1, 2])
def test_ranks_of_fsdp2_have_their_share_of_experts_and_gather_the_rest_of_a_layer(shared: int) -> None:
    """16 bytes of a parameter are spread over 4 ranks; of one layer 10 bytes are whole, of what is in none 4."""
    config = run_of_8(f"train.trainer.expert_parallel={shared}")
    other, own = (footprint(config, EXPERTS, one) for one in (of_deepspeed, of_fsdp2))
    outside, experts = 2 * 1000 * 128 + 128, ROUTED / 3
    layer = 3 * 128 * 128 + 2 * 128 + 2 * 32 + 8 * 128
    assert own.states == 16 * (outside + 3 * (layer + experts)) / 4
    published = 2 * (outside + 3 * (layer + experts)) / 4
    assert own.workspace == 10 * (layer + experts / shared) + 4 * outside + published
    moved = 2 * 2 * 2 * 128 * 16384 if shared > 1 else 0  # two experts of each token, there and back
    assert own.activations == other.activations + moved


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("broadcast", 2 * DENSE), ("delta", 2.5 * DENSE), ("file", (1 + 1 + 2) * 2 * DENSE),
    ],
)  # fmt: skip
def test_weights_are_counted_as_each_transport_holds_them(transport: str, expected: float) -> None:
    """A row for rank 0 and the engines; for changes a quarter more; a copy, the file being written and two before."""
    needs = host_memory(run_of_8(f"train.transport={transport}"), shape_of(LLAMA), WHOLE)
    assert (needs.weights, needs.checkpoint, needs.loading) == (expected, 12 * DENSE, 0)
    assert needs.total == expected + 12 * DENSE


@pytest.mark.parametrize(
    ("sets", "readers"),
    [((), 1), (("train.trainer.zero_stage=2",), 4), (("train.loss.kl_coefficient=0.1",), 1 + 4)],
)
def test_experts_that_are_fused_are_whole_where_they_are_read(sets: tuple[str, ...], readers: int) -> None:
    assert host_memory(run_of_8(*sets), shape_of(EXPERTS), WHOLE).loading == readers * 2 * ROUTED


@pytest.mark.parametrize(
    ("sets", "gigabytes", "key"),
    [
        (("train.trainer.zero_stage=2", "train.loss.kl_coefficient=0"), 28, "train.trainer.zero_stage must be 3: "),
        ((), 14.5, "train.transport must be 'broadcast': "),
        ((), 13, "train.transport must be 'file' and train.weights_folder on a disk: "),
        (
            (),
            11,
            "train.ray_address must lead to a cluster of more machines: 15.0 GB of the memory of this machine are ",
        ),
    ],
)
def test_the_key_to_change_for_a_machine_is_the_one_that_helps(
    monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], gigabytes: float, key: str
) -> None:
    """Of 15 GB 3 go as weights; as a row alone 2.4, as a file on a disk 0.3; 36 for fused experts on four ranks."""

    def counted(config: Any, *_: Any) -> Any:
        transport = config.train.chosen_transport(colocated=config.colocated).name
        weights, loading = (
            {"delta": 3e9, "broadcast": 2.4e9, "file": 0.3e9}[transport],
            36e9 * (config.train.trainer.zero_stage < 3),
        )
        return module.HostMemory(weights, 12e9, loading)

    monkeypatch.setattr(module, "host_memory", counted)
    monkeypatch.setattr(module, "memory_bytes", lambda: gigabytes * 1e9)
    assert message(check_host_memory, run_of_8(*sets), LLAMA).startswith(key)


@pytest.mark.parametrize(
    ("share", "ranks", "readers"),
    [
        (Share("a", 1e12, workers=4, ranks=0, leads=False), 0, 0),
        (Share("b", 1e12, workers=0, ranks=3, leads=True), 3, 3),
        (Share("c", 1e12, workers=2, ranks=1, leads=False), 1, 1),
    ],
)
def test_a_machine_needs_memory_for_its_part_of_the_run(share: Share, ranks: int, readers: int) -> None:
    """Weights once per machine, whether they leave or arrive there; a quarter of the states per rank."""
    needs, whole = (
        host_memory(run_of_8("train.trainer.zero_stage=2"), shape_of(EXPERTS), one) for one in (share, WHOLE)
    )
    assert (needs.weights, needs.checkpoint) == (whole.weights, ranks / 4 * whole.checkpoint)
    assert needs.loading == readers * 2 * ROUTED


def test_the_machine_of_a_cluster_that_is_too_small_is_named() -> None:
    """Rank 0's has no room for the states of four ranks; the engines' has room for weights."""
    config = run_of_8("train.ray_address=auto")
    shares = [
        Share("host-a 10.0.0.1", 12 * DENSE, 0, 4, leads=True),
        Share("host-b 10.0.0.2", 12 * DENSE, 4, 0, leads=False),
    ]
    line = message(check_host_memory, config, LLAMA, shares)
    assert line.startswith("train.ray_address must lead to machines of more memory: ")
    assert "of the memory of host-a 10.0.0.1 are needed" in line
    check_host_memory(config, LLAMA, shares[1:])
    check_host_memory(run_of_8(), LLAMA)


def check_needs(num_bytes: int, copy: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a copy of this size takes no more, and is refused in one line where the host lacks a byte for it."""
    monkeypatch.setattr(shared_row.psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes - 1))
    text = f"^the host has no memory for a copy: {num_bytes} bytes are needed, {num_bytes - 1} are free$"
    with pytest.raises(BackendError, match=text):
        copy()
    monkeypatch.setattr(shared_row.psutil, "virtual_memory", lambda: SimpleNamespace(available=num_bytes))
    copy()


def test_copies_of_a_rank_take_their_own_size_of_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a power of two, as torch's pinned memory does: a state of 707 float32 numbers, thrice, and weights."""
    linear = torch.nn.Linear(100, 7)
    adamw = torch.optim.AdamW(linear.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: 1.0)
    pieces = [Piece(name, 0, one.numel(), one) for name, one in linear.named_parameters()]
    state = RankState(lambda: pieces, adamw=adamw, schedule=schedule, rank=0, device=torch.device("cpu"))
    check_needs(12 * 707, state.copy, monkeypatch)

    make_model(tmp_path)
    policy = load_policy(str(tmp_path), device="cpu")
    model = PolicyModel(policy, temperature=1.0, value_head=False)
    publisher = Publisher(0, device="cpu", transport=BROADCAST, folder=tmp_path, model_path=str(tmp_path))
    num_bytes = 4 * sum(parameter.numel() for parameter in policy.parameters())
    check_needs(num_bytes, lambda: publisher.publish(model, 1), monkeypatch)
