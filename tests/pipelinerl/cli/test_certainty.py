"""How sure a plan is, as it is printed; the commands that measure, and the plan that takes what they wrote."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, assert_fails, sets
from tiny_plan import priced_plan, unknown_run

from pipelinerl.cli.plan_answer import choice, plan_answer
from pipelinerl.cli.render_certainty import measurement_lines, probability
from pipelinerl.config.check import CHECK_STEPS, check_config
from pipelinerl.config.run import ClusterConfig, RunConfig
from pipelinerl.config.run_file import dump_run, load_run, parse_run, with_overrides
from pipelinerl.config.scheduler import SchedulerConfig
from pipelinerl.records.certainty_report import AsynchronousOdds, CertaintyReport, MeasurementValue
from pipelinerl.records.check_report import CheckReport, CheckRow, Finding
from pipelinerl.records.plan_report import Assumed, Instead
from sim.run import simulate

DECIDES = "phase switch decides most, 40% of the difference"
EXAMPLE = Path(__file__).parents[3] / "examples" / "plan_qwen7b_128_h100.toml"


def value(
    *measured: str, gain: float, commands: tuple[str, ...] = ("do it",), minutes: float = 6.0
) -> MeasurementValue:
    return MeasurementValue(
        measured=list(measured), right=0.7, regret=0.04 - gain, gain=gain, settles=gain > 0.005,
        commands=list(commands), minutes=minutes, gpus=8,
    )  # fmt: skip


def report(*measurements: MeasurementValue, **changed: Any) -> CertaintyReport:
    made = CertaintyReport(
        draws=400, ways=24, tie=0.03, right=0.58, regret=0.043, least_regret=0.04, expected="pipeline 4/4",
        expected_faster=0.0, expected_regret=0.043, keeps_limits=None, asynchronous=None, fits=None, unknown={},
        measurements=list(measurements),
    )  # fmt: skip
    return made.model_copy(update=changed)


def answers(*measurements: MeasurementValue, **changed: Any) -> dict[str, list[str]]:
    return plan_answer(
        priced_plan().model_copy(update={"certainty": report(*measurements, **changed), "decisions": {}})
    )


def test_what_is_recommended_says_why_it_is_and_not_the_one_that_looks_faster() -> None:
    fastest = (
        "Nothing else within the limits is more than 3% faster if all is as expected; on average over 400 draws of "
        "what is not measured it is 4.3% behind the fastest of 24 ways."
    )
    assert answers()["why"] == [fastest]
    own = priced_plan().own
    assert own is not None
    beyond = own.model_copy(update={"keeps_to_limits": False, "recommended_over_own": 0.8})
    made = priced_plan().model_copy(update={"certainty": report(), "own": beyond})
    assert plan_answer(made)["why"] == [f"{fastest} The run file is 25% faster and breaks a limit."]
    other = priced_plan().simulated[-1]
    faster = {"expected": other.label, "expected_faster": 0.19}
    assert answers(**faster, expected_regret=0.15)["why"] == [
        f"{other.label} is 19% faster if all is as expected, but a greater risk: on average over 400 draws of what is "
        "not measured it is 15.0% behind the fastest of 24 ways, this one 4.3%."
    ]
    lags = f"a mean lag of {other.lag_mean:.2f} instead of {priced_plan().recommended.lag_mean:.2f}"
    assert answers(**faster, expected_regret=0.05)["why"] == [  # as good within 3%: the lag has decided
        f"{other.label} is 19% faster if all is as expected, but at {lags}, and on average over 400 draws of what is "
        "not measured no faster within 3%: this one is 4.3% behind the fastest of 24 ways."
    ]


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        (
            "pipeline",
            "Pipeline RL: 3 GPUs generate and 1 trains; 8 sequences in progress on each engine of one GPU; new w",
        ),
        (
            "one_step_off",
            "One_step_off RL: 3 GPUs generate and 1 trains; 8 sequences in progress on each engine of one",
        ),
        (
            "conventional",
            "Conventional RL: all 4 GPUs generate, then all train; 8 sequences in progress on each engine",
        ),
        (
            "partial_rollouts",
            "Partial_rollouts RL: all 4 GPUs generate, then all train; 8 sequences in progress on eac",
        ),
    ],
)
def test_the_answer_says_which_gpus_do_what(kind: str, split: str) -> None:
    """Where the same GPUs do both, a split that the question holds is not one of the answer."""
    best = priced_plan().recommended
    scheduler = SchedulerConfig(kind=kind, train_batch_size=8, generation_batch_size=8, publish_every=2)
    cluster = ClusterConfig(accelerators=4, generation_accelerators=3)
    words = choice(best.model_copy(update={"scheduler": scheduler, "cluster": cluster}))
    assert words.startswith(split)
    assert ("optimizer steps on what was generated at once" in words) == (kind != "pipeline")
    assert f"That gives {best.tokens_per_s:,.0f} tokens/s (" in words


def test_one_gpu_generates_and_one_trains() -> None:
    scheduler = SchedulerConfig(kind="pipeline", train_batch_size=8, generation_batch_size=8)
    changed = {"scheduler": scheduler, "cluster": ClusterConfig(accelerators=2, generation_accelerators=1)}
    words = choice(priced_plan().recommended.model_copy(update=changed))
    assert words.startswith("Pipeline RL: 1 GPU generates and 1 trains; 8 sequences")


@pytest.mark.parametrize(("idle", "rest"), [(1, "1 stands idle"), (3, "3 stand idle")])
def test_the_answer_says_which_gpus_stand_idle(idle: int, rest: str) -> None:
    scheduler = SchedulerConfig(kind="conventional", train_batch_size=8, generation_batch_size=8)
    changed = {"scheduler": scheduler, "cluster": ClusterConfig(accelerators=4), "idle": idle}
    words = choice(priced_plan().recommended.model_copy(update=changed))
    assert words.startswith(
        f"Conventional RL: 4 of {4 + idle} GPUs generate, then these train, and {rest}; 8 sequences"
    )


def test_how_sure_a_plan_is_of_its_speed_its_limits_and_its_memory() -> None:
    assert answers()["how sure"] == ["Fastest within 3% with probability 0.58."]
    assert answers(keeps_limits=0.62, fits=0.876)["how sure"] == [
        "Fastest within 3% with probability 0.58; keeps to the limits with probability 0.62; memory suffices with "
        "probability 0.88."
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "at most 0.005"),
        (0.006, "0.01"),
        (0.5, "0.50"),
        (0.994, "0.99"),
        (0.9951, "at least 0.995"),
        (1.0, "at least 0.995"),
    ],
)
def test_no_probability_is_told_as_certain(value: float, words: str) -> None:
    assert probability(value) == f"with probability {words}"


@pytest.mark.parametrize(
    ("faster", "certain", "end", "changes"),
    [
        (0.71, False, "0.71: not certain.", [f"Asynchronous or synchronous: {DECIDES}."]),
        (0.97, True, "0.97.", []),
        (0.01, True, "0.01.", []),
    ],
)
def test_asynchronous_rl_is_certain_or_it_is_said_what_decides(
    faster: float, certain: bool, end: str, changes: list[str]
) -> None:
    odds = AsynchronousOdds(faster=faster, certain=certain, decided_by="phase switch", share=0.4)
    said = answers(asynchronous=odds)
    assert said["how sure"][0].endswith(f"; asynchronous RL is faster than synchronous RL with probability {end}")
    assert said["depends on"] == changes


def test_the_assumption_with_the_most_effect_is_among_what_it_depends_on() -> None:
    others = [
        Instead(value=0.5, throughput=1.47, fastest="pipeline"),
        Instead(value=2.0, throughput=0.9, fastest=None),
    ]
    made = priced_plan().model_copy(
        update={"assumed": [Assumed(key="workload.length.cv", value=1.0, instead=others)], "decisions": {}}
    )
    assert plan_answer(made)["depends on"][-1] == (
        "The assumption with the most effect is workload.length.cv = 1: 0.5 gives +47% (pipeline turns "
        "the fastest), 2 gives -10%."
    )


def test_the_next_step_is_the_measurement_that_gains_nearly_all_for_the_fewest_commands() -> None:
    measurements = (
        value("weight transfer", gain=0.02),
        value("decode step", gain=0.001),
        value("weight transfer", "mean answer", gain=0.024, commands=("this", "that")),
    )
    assert answers(*measurements)["next"] == [
        "Measure weight transfer (about 6 minutes on 8 GPUs), which gains 2.0% throughput on average, and plan again "
        "with --measured:",
        "$ do it",
    ]
    assert measurement_lines(report(*measurements)) == [
        "throughput that a measurement gains on average, and the probability of the fastest, 0.58 now:",
        "  +2.0%, 0.70: weight transfer (about 6 minutes on 8 GPUs)",
        "  nothing: decode step",
        "  +2.4%, 0.70: weight transfer and mean answer (about 6 minutes on 8 GPUs)",
    ]
    assert measurement_lines(report(*measurements, right=0.7))[1:2] == [
        "  +2.0%: weight transfer (about 6 minutes on 8 GPUs)"  # no surer
    ]


def test_without_a_command_that_gains_nearly_all_the_best_command_is_next() -> None:
    far, near = value("mean answer", gain=0.05, commands=()), value("switch", gain=0.01)
    assert answers(far, near)["next"][1:] == ["$ do it"]
    know = "Know mean answer, which gains 5.0% throughput on average, and ask again;"
    assert answers(far)["next"] == [f"{know} train --check measures that where the run file has [train]."]
    made = priced_plan().model_copy(update={"certainty": report(far), "asked": {"train": {}}})
    assert plan_answer(made)["next"] == [f"{know} no command measures that."]


def test_nothing_to_measure_is_said() -> None:
    for measurements in ((), (value("switch", gain=0.0),)):
        assert answers(*measurements)["next"] == ["No measurement would change the plan: run it."]
        assert measurement_lines(report(*measurements)) == []


def test_a_check_of_a_run_file_is_its_first_steps() -> None:
    whole = load_run(EXAMPLE, ["scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=32"])
    short = check_config(whole)
    assert (whole.optimizer_steps, short.optimizer_steps) == (1000, CHECK_STEPS)
    assert (whole.scheduler.optimizer_steps_per_rl_step, short.scheduler.optimizer_steps_per_rl_step) == (32, 1)
    assert short.cluster == whole.cluster


@pytest.mark.parametrize(("finding", "status"), [(Finding.SLOW, 0), (Finding.UNCHECKED, 0), (Finding.WRONG, 1)])
def test_train_check_ends_with_status_1_if_something_is_wrong(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finding: Finding, status: int
) -> None:
    """Its hardware may come from another file."""
    hardware = tmp_path / "hw.toml"
    hardware.write_text('[hardware]\ngpu = "H200"\nmodel = "Qwen2.5-7B"\n')
    gpus, seen = [], list[tuple[Path, bool]]()

    def check(config: RunConfig, *, out: Path, shared: bool, **_: Any) -> CheckReport:
        seen.append((out, shared))
        gpus.append(config.hardware.gpu)
        return CheckReport(rows=[CheckRow(what="links", measured="1 GB/s", finding=finding, advice="look")])

    monkeypatch.setattr("backends.check.run_check.check", check)
    assert command("train", EXAMPLE, "--check", "--out", tmp_path / "out").status == status
    result = command("train", EXAMPLE, "--check", "--json", "--hardware", hardware)
    assert (result.status, json.loads(result.out)["rows"][0]["finding"]) == (status, finding)
    (out, shared), (temporary, alone) = seen
    assert (out, shared, alone) == (tmp_path / "out", True, False)
    assert not temporary.exists()
    assert gpus == ["H100", "H200"]
    assert_fails(command("train", EXAMPLE, "--check", "--resume"), 2, "--check begins a run of its own, got --resume")


@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("in_this_process")
@pytest.mark.slow
def test_a_plan_takes_what_was_measured_and_is_surer(command: Command, tmp_path: Path) -> None:
    """What it proposes carries the file of hardware and the overrides, and is a command."""
    path, check, hardware = tmp_path / "run.toml", tmp_path / "check", tmp_path / "hw.toml"
    hardware.write_text('[hardware]\ngpu = "H100"\nmodel = "Qwen2.5-1.5B"\n')
    path.write_text(dump_run(unknown_run()))
    truth = "hardware.coefficients={sync_s_per_root_gb=6.0}"
    simulate(check_config(unknown_run(truth)), out=check, trace=True)
    plans = [
        json.loads(
            command("plan", path, "--json", *sets("seed=1", "plan.simulate=5"), *options, "--hardware", hardware).out
        )["certainty"]
        for options in ([], ["--measured", check])
    ]
    assert plans[1]["right"] > plans[0]["right"] + 0.1
    assert plans[1]["unknown"]["decode step"] < plans[0]["unknown"]["decode step"]
    (asked,) = plans[0]["measurements"][0]["commands"]
    assert f"{path} --hardware {hardware} --set seed=1 --weight-sync-s SECONDS" in asked
    assert (
        command(
            *shlex.split(asked.replace("SECONDS", "5").replace("measured_sync.toml", str(tmp_path / "m.toml")))[1:]
        ).status
        == 0
    )
    for name in ("plan", "simulate", "compare"):
        assert_fails(
            command(name, path, "--measured", tmp_path / "none"), 2, "--measured must be a folder of `measure`"
        )


@pytest.mark.usefixtures("in_this_process", "no_figures")
@pytest.mark.slow
def test_simulate_and_compare_take_what_was_measured_each_arm_its_own(command: Command, tmp_path: Path) -> None:
    """Weights that take 3 s in a run of the pipeline do so in its arm, and not in that of synchronous RL."""
    base = unknown_run("hardware.weights={publish_s=0.5}").model_dump(mode="json", exclude_none=True)
    slow, path = tmp_path / "slow", tmp_path / "run.toml"
    simulate(check_config(parse_run(with_overrides(base, ["hardware.weights.publish_s=3.0"]))), out=slow, trace=True)
    path.write_text(dump_run(parse_run({**base, "optimizer_steps": 6})))

    def publish_s(folder: Path) -> float:
        weights = load_run(folder / "run.toml").hardware.weights
        assert weights is not None
        return weights.publish_s

    assert command("simulate", path, "--measured", slow, "--out", tmp_path / "s").status == 0
    assert publish_s(tmp_path / "s") == pytest.approx(3.0, rel=0.01)
    arms = 'compare.arms=[{ name = "a" }, { name = "b", set = ["scheduler.kind=conventional"] }]'
    result = command("compare", path, "--measured", slow, "--out", tmp_path / "c", *sets(arms, "compare.baseline=a"))
    assert result.status == 0
    assert [publish_s(tmp_path / "c" / "as_given" / arm) for arm in "ab"] == pytest.approx([3.0, 0.5], rel=0.01)
