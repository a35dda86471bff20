"""What a run file resolves to: tables from names, what is given stays, and what does not fit is refused."""

import json
import math
import tomllib

import pytest
import tomli_w
from derived import H100, QWEN7B, by_name, derived, run_data, trained
from refusals import message

from pipelinerl.config.resolve import least_memory, resolved_hardware, run_coefficients, run_trainer_fits
from pipelinerl.config.run import dump_run, load_run, parse_run, with_overrides
from pipelinerl.hardware.catalogue import find_gpu, find_model
from pipelinerl.hardware.coefficients import Level, coefficients
from pipelinerl.hardware.costs import RooflineDecode
from pipelinerl.hardware.transport import DELTA, FILE, changed_share
from sim.run import simulate

LLAMA70B = find_model("Llama-3.1-70B")


def test_by_name_gives_every_table():
    config = by_name(level="pessimistic")
    tables = resolved_hardware(config)
    expected = derived(level=Level.PESSIMISTIC)
    for name in ("decode", "prefill", "kv_cache_tokens", "training", "weights", "switch"):
        assert getattr(tables, name) == getattr(expected, name), name
    assert (tables.gpu, tables.model, tables.level) == ("H100", "Qwen2.5-7B", Level.PESSIMISTIC)


def test_weights_travel_as_train_transport_has_it_unless_the_run_file_says_how_long_they_take():
    """The default of GPUs apart is to send while all go on; what [hardware] says of the weights comes first."""
    sent = resolved_hardware(trained(trainer={})).weights
    values = coefficients(Level.CENTRAL, {"changed_share": changed_share(1e-6, Level.CENTRAL)})
    assert sent == derived(values=values, transport=DELTA, zero_stage=2).weights
    assert sent.transfer_s > 5 * (sent.publish_s + sent.pause_s)
    by_file = parse_run(with_overrides(trained(trainer={}).model_dump(mode="json"), ["train.transport=file"]))
    assert resolved_hardware(by_file).weights == derived(transport=FILE, zero_stage=2).weights
    for given in ({"weight_sync": "reshard"}, {"coefficients": {"sync_s_per_root_gb": 0.5}}, {"weights": {}}):
        assert resolved_hardware(trained(trainer={}, **given)).weights == resolved_hardware(trained(**given)).weights


def test_the_share_of_changed_numbers_is_measured_or_by_the_learning_rate_or_by_one_that_is_assumed():
    """`trained` has 1e-6, a publication every second step; the level assumes 1e-6."""
    sets = ["train.transport=delta", "scheduler.publish_every=2"]
    stated = [{}, {"coefficients": {"changed_share": 0.05}}]
    runs = [parse_run(with_overrides(trained(trainer={}, **one).model_dump(mode="json"), sets)) for one in stated]
    shares = [run_coefficients(run, H100, QWEN7B, training_accelerators=8, longest=100).changed_share for run in runs]
    assert shares == [changed_share(2e-6, Level.CENTRAL), 0.05]
    assert resolved_hardware(runs[0]).weights.publish_s < resolved_hardware(runs[1]).weights.publish_s
    values = run_coefficients(trained(), H100, QWEN7B, training_accelerators=8, longest=100)
    assert values.changed_share == coefficients(Level.CENTRAL).changed_share


@pytest.mark.parametrize(
    ("device", "transport", "colocated", "chosen"),
    [
        ("gpu", None, False, "delta"),
        ("gpu", None, True, "file"),
        ("cpu", None, False, "file"),
        ("cpu", "broadcast", False, "broadcast"),
        ("gpu", "file", False, "file"),
        ("gpu", "broadcast", True, "file"),  # a candidate of a plan; `train` refuses it
    ],
)
def test_a_run_and_its_simulation_choose_the_same_transport(device, transport, colocated, chosen):
    train = trained(trainer={}).train.model_copy(update={"device": device, "transport": transport})
    assert train.chosen_transport(colocated=colocated).name == chosen


def test_given_tables_stay():
    given_tables = {
        "decode": {"kind": "affine", "step_s": 0.01}, "prefill": {"token_s": 1e-5}, "kv_cache_tokens": 1234,
        "training": {"token_s": 1e-3}, "weights": {"pause_s": 0.5}, "switch": {"to_training_s": 3.0},
        "latency": {"reward_s": 0.25},
    }  # fmt: skip
    for name, table in given_tables.items():
        config = by_name(**{name: table})
        tables = resolved_hardware(config)
        assert getattr(tables, name) == getattr(config.hardware, name), name
        others = [other for other in given_tables if other not in (name, "latency")]
        assert all(getattr(tables, other) == getattr(derived(), other) for other in others), name


def test_without_names_missing_tables_cost_nothing():
    config = parse_run(run_data(decode={"kind": "affine", "step_s": 0.01}, training={"token_s": 1e-4}))
    tables = resolved_hardware(config)
    assert tables.kv_cache_tokens is None
    seconds = [*tables.prefill.model_dump().values(), *tables.weights.model_dump().values()]
    assert {*seconds, *tables.switch.model_dump().values()} == {0.0}


def test_a_given_capacity_needs_no_fit():
    config = parse_run(run_data(gpu="H100", model="Llama-3.1-70B", kv_cache_tokens=500))
    assert resolved_hardware(config).kv_cache_tokens == 500


def test_coefficients_of_the_run_file_are_used():
    expected = derived(values=coefficients(Level.CENTRAL, {"training_mfu": 0.31}))
    assert resolved_hardware(by_name(coefficients={"training_mfu": 0.31})).training == expected.training


@pytest.mark.parametrize(("stage", "spread"), [(0, 16), (1, 4 + 12 / 16), (2, 2 + 14 / 16), (3, 1)])
def test_the_switch_moves_what_the_zero_stage_leaves_on_an_accelerator(stage, spread):
    """Bytes per parameter over 16 accelerators, at 25 GB/s, both ways, and 6 s besides."""
    config = trained(trainer={"zero_stage": stage})
    config = config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"kind": "conventional"})})
    assert resolved_hardware(config).switch.to_training_s == pytest.approx(6 + spread * QWEN7B.parameters / 25e9)


def test_colocated_accelerators_all_train():
    tables = run_data(gpu="H100", model="Qwen2.5-7B")
    tables["scheduler"]["kind"] = "conventional"
    assert resolved_hardware(parse_run(tables)).switch == derived(trainers=16, colocated=True).switch


def test_paths_of_a_run_file_are_relative_to_it(tmp_path):
    """A GPU and a model of one's own, found from any folder, and kept by the copy that a run writes."""
    (tmp_path / "mine.toml").write_text(
        "bf16_flops = 5e14\nmemory_bytes = 64e9\nbandwidth = 2e12\nnetwork = 25e9\n", encoding="utf-8"
    )
    (tmp_path / "models" / "own").mkdir(parents=True)
    config = {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "vocab_size": 32000}
    config |= {"intermediate_size": 4096}
    (tmp_path / "models" / "own" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tables = run_data(gpu="mine.toml", model="models/own") | {"optimizer_steps": 1}
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    config = load_run(tmp_path / "run.toml")
    assert config.hardware.gpu == str(tmp_path / "mine.toml")
    assert config.hardware.model == str(tmp_path / "models" / "own")
    tables = resolved_hardware(config)
    assert isinstance(tables.decode, RooflineDecode)
    assert tables.decode.peak_flops == 5e14
    assert tomllib.loads(dump_run(config))["hardware"]["gpu"] == str(tmp_path / "mine.toml")
    assert simulate(config).samples_trained == 16


def test_each_kind_of_accelerator_has_to_hold_its_own_side():
    """70B, 141 GB: one MI300X holds it as an engine, one H100 does not, whoever trains."""
    held = parse_run(run_data(gpu="H100", generation_gpu="MI300X", model="Llama-3.1-70B"))
    assert resolved_hardware(held).kv_cache_tokens == derived(find_gpu("MI300X"), LLAMA70B).kv_cache_tokens
    sizes = {"tensor_parallel": 1, "training_accelerators": 8, "longest": 100}
    mixed, alone = (
        least_memory(one, find_gpu("H100"), LLAMA70B, **sizes)
        for one in (held, parse_run(run_data(gpu="H100", model="Llama-3.1-70B")))
    )
    assert mixed == pytest.approx(
        [alone[0] * find_gpu("H100").memory_bytes / find_gpu("MI300X").memory_bytes, alone[1]]
    )
    swapped = parse_run(run_data(gpu="MI300X", generation_gpu="H100", model="Llama-3.1-70B"))
    assert "is too small for Llama-3.1-70B on H100:" in message(resolved_hardware, swapped)


RANGE = "hardware.gpu, hardware.model and hardware.coefficients give a table that a run file could not have: "


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # 141 GB on 73.5 usable of each: two have 147.1, which leaves room for 100 tokens.
        (["hardware.model=Llama-3.1-70B"],
            "cluster.tensor_parallel=1 is too small for Llama-3.1-70B on H100: weights of 141.1 GB and the KV cache of "
            "one rollout of 100 tokens need 141.1 GB, 73.5 GB are available; the smallest that fits is "
            "tensor_parallel=2"),
        # 65.5 GB of weights leave 8 GB, 30 521 tokens, for a rollout of 40 000.
        (["hardware.model=Qwen2.5-32B", "workload.length.max=40000"],
            "one rollout of 40000 tokens need 76.0 GB, 73.5 GB are available"),
        (["hardware.coefficients.memory_reserve_bytes=1e12"], "0.0 GB are available; none is large enough"),
        (["hardware.generation_gpu=H2O"],
            "hardware.generation_gpu must be a name of the catalogue or a file, got 'H2O'; did you mean H20"),
        (["hardware.coefficients.training_step_s=1e308"],
            f"{RANGE}TrainingConfig.step_s must be at most 100000, got 1e+308"),
        (["hardware.coefficients.layer_overhead_s=1e308"],
            f"{RANGE}RooflineDecode.step_overhead_s must be a number, got Infinity"),
    ],
)  # fmt: skip
def test_what_does_not_fit_or_is_unknown_is_one_line(overrides, words):
    config = parse_run(with_overrides(run_data(gpu="H100", model="Qwen2.5-7B"), overrides))
    assert words in message(resolved_hardware, config)


def run_values(config, *, accelerators=8, longest=9000):
    return run_coefficients(config, H100, QWEN7B, training_accelerators=accelerators, longest=longest)


def fits(config, *, accelerators=8, longest=9000):
    return run_trainer_fits(config, H100, QWEN7B, training_accelerators=accelerators, longest=longest)


@pytest.mark.parametrize("level", Level)
def test_every_level_has_packs_that_its_trainer_can_hold(level):
    """Without recomputation, 8 H100s beside 15.2 GB of states and 1.6 of logits: 60.5 GB / 5.5 MB = 10 993 tokens."""
    config = trained(level.value)
    values = run_values(config)
    expected = {"optimistic": 10_993, "central": 16_384, "pessimistic": 9000}  # the longest; not 8192
    assert math.floor(values.pack_tokens) == expected[level.value]
    assert fits(config)
    assert not fits(config, accelerators=1)
    resolved = resolved_hardware(config).training
    packed = derived(values=run_values(config, longest=100)).training
    assert resolved == packed


def test_a_pack_holds_the_longest_rollout_or_training_does_not_fit():
    """Without recomputation 8 share a sequence of 80 000 tokens; one alone holds 10 993 of them."""
    together, alone = trained("optimistic"), trained("optimistic", coefficients={"sequence_accelerators": 1.0})
    assert fits(together, longest=80_000)
    assert not fits(alone, longest=11_500)
    assert run_values(alone, longest=11_500).pack_tokens == 11_500
    assert fits(trained("central"), longest=80_000)


def test_stated_settings_of_the_trainer_count_at_every_level():
    """Packs and recomputation are known then: of these the band has none, and a pack that does not fit is refused."""
    for level in Level:
        values = run_values(trained(level.value, {"pack_tokens": 12_000, "activation_checkpointing": True}))
        assert (values.pack_tokens, values.recomputation) == (12_000, 1.0)
    assert not fits(
        trained(trainer={"zero_stage": 3, "activation_checkpointing": False})
    )  # 16 384 tokens, not computed again: 90 GB
    assert fits(trained(trainer={"zero_stage": 3}))  # the default
    assert not fits(trained(trainer={"zero_stage": 0}))
    kept = run_values(trained(trainer={}, coefficients={"recomputation": 0.5}))
    assert (kept.recomputation, kept.pack_tokens) == (0.5, 16_384)
    some = (0, 1, 7, 28, 40)  # of 28 layers
    shares = [run_values(trained(trainer={"activation_checkpointing": number})).recomputation for number in some]
    assert shares == [0, 1 / 28, 0.25, 1, 1]
    slow, fast = (
        resolved_hardware(trained(trainer={"activation_checkpointing": again})).training.token_s
        for again in (True, False)
    )
    assert slow > fast
