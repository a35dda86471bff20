"""The bottleneck of a run: why slots are free while the trainer waits for data."""

from pathlib import Path

import pytest
from played_run import environment, fixed, play

from pipelinerl.config.run_file import load_run
from pipelinerl.records.bottleneck import Admission, Bottleneck, find_bottleneck
from sim.planning.screen import Candidate
from sim.planning.simulate import Job, extended
from sim.run import simulate, simulate_steps

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
TWICE = ("cluster.accelerators=12", "cluster.generation_accelerators=8")
SLOW_REWARDS = "hardware.latency.reward_s=60"


def quickstart(*overrides: str):
    return load_run(QUICKSTART, ["optimizer_steps=30", *overrides])


@pytest.mark.parametrize(
    ("override", "bottleneck", "remedy"),
    [
        ("scheduler.max_lag=0", Bottleneck.LAG, ("scheduler.max_lag=2",)),
        (SLOW_REWARDS, Bottleneck.REWARD, ("scheduler.ready_queue_size=1000",)),
        ("scheduler.max_lag=100", Bottleneck.GENERATION, TWICE),
        ("scheduler.weight_update=wait", Bottleneck.GENERATION, TWICE),
    ],
)
def test_the_bottleneck_is_the_reason_of_free_slots_and_its_remedy_helps(override, bottleneck, remedy):
    report = simulate(quickstart(override))
    assert report.bottleneck is bottleneck
    assert simulate(quickstart(override, *remedy)).tokens_per_s > 1.15 * report.tokens_per_s


def test_twice_as_many_engines_do_not_help_against_a_bound_on_the_lag():
    report = simulate(quickstart("scheduler.max_lag=0"))
    assert simulate(quickstart("scheduler.max_lag=0", *TWICE)).tokens_per_s < 1.05 * report.tokens_per_s


@pytest.mark.parametrize("override", ["scheduler.max_lag=0", SLOW_REWARDS, "scheduler.max_lag=100"])
def test_a_plan_gives_the_same_verdict_from_its_steps_alone(override):
    config = quickstart(override)
    steps = simulate_steps(config)
    report = simulate(config)
    assert [step.in_progress for step in steps] == report.steps.in_progress.tolist()
    assert report.bottleneck is find_bottleneck(
        steps,
        colocated=False,
        duration_s=report.duration_s,
        training_s=report.seconds.training,
        waiting_s=report.seconds.waiting_for_data,
        admission=Admission.of(config),
        scoring=sum(step.scoring for step in steps) / len(steps),
    )


def test_free_slots_are_blamed_on_the_cause_that_would_fill_most_of_them():
    """100 slots. 5 free ones are none; of 40, 21 rollouts being scored would fill most and 20 would not."""
    gated, free = Admission(slots=100, lag_gate=True), Admission(slots=100, lag_gate=False)
    assert gated.limit(in_progress=95, scoring=50) is Bottleneck.GENERATION
    assert gated.limit(in_progress=60, scoring=21) is free.limit(in_progress=60, scoring=21) is Bottleneck.REWARD
    assert gated.limit(in_progress=60, scoring=20) is Bottleneck.LAG
    assert free.limit(in_progress=60, scoring=20) is Bottleneck.GENERATION


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token_s", "verdict", "remedy"),
    [(0.004, Bottleneck.PREFILL, "prefill"), (0.0005, Bottleneck.GENERATION, "decode")],
)
def test_of_prefill_and_decode_the_one_is_named_whose_speed_helps(token_s, verdict, remedy):
    """Turns of 10 tokens, whose contexts of 100 to 190 are prefilled whole. A plan reports the same.

    What has a share p of the work gives a factor of 1 / (1 - p / 2) at twice its speed: above 4/3 if p is above 1/2.
    """

    def run(**twice):
        token, step = token_s / twice.get("prefill", 1), 0.05 / twice.get("decode", 1)
        hardware = {"prefill": {"token_s": token}, "decode": {"kind": "affine", "step_s": step}}
        turns = environment(count=40, turns=4, observation=20, prefix_cache="off")
        sizes = {"batch": 8, "slots": 4, "engines": 2, "length": fixed(10), "prompt_tokens": 100}
        return play(20, **sizes, hardware=hardware, environment=turns).config

    config = run()
    report = simulate(config)
    assert report.bottleneck is verdict
    job = Job(Candidate({}, config, "as it is"), steps=20)
    assert extended(job, simulate_steps(config)).bottleneck is verdict
    faster = {part: simulate(run(**{part: 2})).tokens_per_s / report.tokens_per_s for part in ("prefill", "decode")}
    assert faster.pop(remedy) > 4 / 3
    assert max(faster.values()) < 4 / 3


@pytest.mark.parametrize(
    ("overrides", "lag_gate"),
    [((), False), (("scheduler.max_lag=3",), True), (("scheduler.max_lag=3", "scheduler.on_stale=drop"), False)],
)
def test_only_a_bound_kept_by_waiting_holds_admissions_back(overrides, lag_gate):
    assert Admission.of(quickstart(*overrides)) == Admission(slots=4 * 32, lag_gate=lag_gate)


@pytest.mark.parametrize("kind", ["conventional", "one_step_off", "partial_rollouts"])
def test_schedules_with_rounds_have_free_slots_anyway(kind):
    assert Admission.of(quickstart(f"scheduler.kind={kind}")) is None
