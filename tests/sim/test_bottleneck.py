"""The bottleneck of a run: why slots are free while the trainer waits for data."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from played_run import environment, fixed, play

from pipelinerl.config.run import load_run
from pipelinerl.pages.runs import run_page
from pipelinerl.records.reports import Bottleneck
from pipelinerl.records.step_ledger import Admission, find_bottleneck
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


def test_environments_in_use_are_blamed_for_free_slots_that_neither_scoring_nor_the_gate_explains():
    """100 slots, 40 environments, all but 2 of which (5 %) are in use; 10 of 40 free slots would be scored ones."""
    admission = Admission(slots=100, lag_gate=True, environments=40)
    assert admission.limit(in_progress=60, scoring=10, in_use=38) is Bottleneck.ENVIRONMENT
    assert admission.limit(in_progress=60, scoring=10, in_use=37) is Bottleneck.LAG
    assert admission.limit(in_progress=60, scoring=21, in_use=38) is Bottleneck.REWARD
    assert admission.limit(in_progress=96, scoring=10, in_use=38) is Bottleneck.GENERATION


@pytest.mark.parametrize(
    ("kind", "facts", "verdict"),
    [
        # 100 s, of which the trainer works 20: one scorer is busy 95 s, or 94.
        ("apart", {"scorers_s": 95}, Bottleneck.REWARD),
        ("apart", {"scorers_s": 94}, Bottleneck.GENERATION),
        # Colocated, the generation phases take 80 s: 95 % of them are 76.
        ("colocated", {"scorers_s": 76}, Bottleneck.REWARD),
        ("colocated", {"scorers_s": 75}, Bottleneck.GENERATION),
        # Two steps of 10 rollouts.
        ("apart", {"given_up": 21}, Bottleneck.DISCARDS),
        ("apart", {"given_up": 20}, Bottleneck.GENERATION),
        ("colocated", {"given_up": 21}, Bottleneck.DISCARDS),
        ("apart", {"given_up": 21, "prefill": 0.6}, Bottleneck.DISCARDS),
        ("apart", {"given_up": 21, "scorers_s": 95}, Bottleneck.REWARD),
        # 60 of 100 slots in use, of the free ones 21 by rollouts being scored: engines do not limit.
        ("free slots", {"given_up": 21, "scoring": 21}, Bottleneck.REWARD),
    ],
)
def test_busy_scorers_and_discards_come_before_generation(kind, facts, verdict):
    steps = [SimpleNamespace(samples=10, ready=0, in_progress=60 if kind == "free slots" else 100)] * 2
    times = {"duration_s": 100, "training_s": 20, "waiting_s": 80}
    colocated = kind == "colocated"
    admission = None if colocated else Admission(slots=100, lag_gate=False)
    assert find_bottleneck(steps, colocated=colocated, admission=admission, **times, **facts) is verdict


def test_neither_is_named_where_the_trainer_does_not_wait():
    times = {"duration_s": 100, "training_s": 96, "waiting_s": 4, "scorers_s": 100, "given_up": 100}
    steps = [SimpleNamespace(samples=10, ready=10, in_progress=100)]
    assert find_bottleneck(steps, colocated=False, **times) is Bottleneck.TRAINING
    assert find_bottleneck(steps, colocated=True, **times) is Bottleneck.TRAINING


ONE_SCORER = ("hardware.latency.reward_s=0.5", "hardware.latency.reward_workers=1")


@pytest.mark.parametrize(
    "overrides",
    [
        ("scheduler.on_full=drop_oldest",),
        (),
        ("scheduler.kind=conventional", "scheduler.optimizer_steps_per_rl_step=4"),
        ("scheduler.kind=one_step_off",),
    ],
    ids=["drop oldest", "wait", "conventional", "one step off"],
)
def test_the_one_scorer_is_named_and_a_faster_one_helps(overrides):
    """It takes 32 s for each batch of 64; the trainer and the engines are much faster."""
    report = simulate(quickstart(*overrides, *ONE_SCORER))
    assert report.bottleneck is Bottleneck.REWARD
    faster = simulate(quickstart(*overrides, *ONE_SCORER, "hardware.latency.reward_s=0.25"))
    assert faster.tokens_per_s > 1.5 * report.tokens_per_s
    assert "Rewards are the bottleneck" in str(run_page({"it": report}).sections[0])


def test_discards_are_named_on_the_page_and_without_them_the_run_is_faster():
    """Of groups of 8 with success 0.03, 0.97^8 = 78 % have equal rewards."""
    overrides = ("workload.success_rate=0.03", "scheduler.max_lag=100")
    report = simulate(quickstart(*overrides, "scheduler.filter_no_signal=true"))
    assert report.bottleneck is Bottleneck.DISCARDS
    assert simulate(quickstart(*overrides)).tokens_per_s > 1.5 * report.tokens_per_s
    page = run_page({"it": report})
    assert "Discards are the bottleneck" in str(page.sections[0])
    assert ["bottleneck", "discard-bound: more rollouts are given up than trained on"] in page.tables[0].rows


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
