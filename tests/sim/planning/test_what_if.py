"""What other values would change, alone; and what made the difference between two plans."""

import pytest
from tiny_plan import TINY, priced_plan, tiny_run

from pipelinerl.cli.render_what_if import against_lines, assumption_lines
from pipelinerl.config.question import Assumption, asked_of
from pipelinerl.config.run_file import with_overrides
from sim.planning.what_if import best_screened, compared_with, effects_of

TABLES = asked_of(tiny_run(), whole=True)


@pytest.mark.parametrize("kind", ["pipeline", "conventional"])
def test_the_effect_of_a_value_is_that_of_the_best_with_it_over_the_best_without_of_the_recommended_kind(
    kind: str,
) -> None:
    """A value as it is changes nothing; twice the training time moves the best by what a screening of both says.

    By expectation the pipeline is the faster one in all of this: where risk speaks for the other, as in the second
    case, the page does not call the pipeline the fastest.
    """
    assumed = [
        Assumption("seed", 0, (0,)),
        Assumption("hardware.coefficients.training_mfu", 0.3, (0.1, 0.3)),
        Assumption("workload.length.mean", 100, (400,)),
    ]
    rows = {row.key: row for row in effects_of(assumed, TABLES, kind)}
    assert [one.throughput for one in rows["seed"].instead] == [1.0]
    slow, fast = (
        best_screened(with_overrides(TABLES, [f"hardware.coefficients.training_mfu={mfu}"]))[kind] for mfu in (0.1, 0.3)
    )
    assert next(iter(best_screened(TABLES))) == "pipeline"
    assert {one.fastest for row in rows.values() for one in row.instead} == {None}
    base = best_screened(TABLES)[kind]
    ratios = [one.throughput for one in rows["hardware.coefficients.training_mfu"].instead]
    assert ratios == [slow.tokens_per_s / base.tokens_per_s, fast.tokens_per_s / base.tokens_per_s]
    assert slow.tokens_per_s < fast.tokens_per_s
    assert [one.throughput for one in rows["workload.length.mean"].instead] == [None]  # not below the longest, 300


def test_the_most_influential_assumption_comes_first() -> None:
    assumed = [Assumption("seed", 0, (0,)), Assumption("hardware.gpu", "H100", ("A100",))]
    assert [row.key for row in effects_of(assumed, TABLES, "pipeline")] == ["hardware.gpu", "seed"]


def test_a_value_with_which_another_kind_turns_the_fastest_says_so() -> None:
    """The pipeline publishes once per optimizer step, or per eight: 100 s for each leave synchronous RL ahead."""
    lists = ["plan.publish_every=[1]", "plan.optimizer_steps_per_rl_step=[4]", "hardware.weights.publish_s=0.0"]
    tables = with_overrides(TABLES, lists)
    (row,) = effects_of([Assumption("hardware.weights.publish_s", 0.0, (100.0,))], tables, "pipeline")
    assert row.instead[0].fastest == "conventional"
    assert row.instead[0].throughput is not None
    assert row.instead[0].throughput < 0.1


def test_a_plan_against_another_names_every_key_that_differs_and_no_other() -> None:
    before = priced_plan()
    overrides = ("hardware.gpu='A100'", "price.gpu_hour=2.0", "optimizer_steps=60", "seed=4", "plan.simulate=9")
    tables = asked_of(tiny_run(*overrides), whole=True)
    against = compared_with("old", before, tables)
    assert {one.key: (one.before, one.alone.value) for one in against.changed} == {
        "hardware.gpu": ("H100", "A100"),
        "optimizer_steps": (40, 60),
    }
    gpu = next(one for one in against.changed if one.key == "hardware.gpu")
    assert gpu.alone.throughput is not None
    assert gpu.alone.throughput < 1.0
    assert against.tokens_per_s == before.recommended.tokens_per_s


def test_words_say_what_was_assumed_and_what_changed() -> None:
    report = priced_plan()
    assert assumption_lines(report) == []
    assert against_lines(report) == []
    assumed = effects_of([Assumption("hardware.weight_sync", None, ("broadcast",))], TABLES, "pipeline")
    against = compared_with("old", report, report.asked)
    told = report.model_copy(update={"assumed": assumed, "against": against})
    title, line = assumption_lines(told)
    assert title.startswith("assumed, the most influential first")
    assert line.startswith("  hardware.weight_sync = not given: broadcast gives ")
    lines = against_lines(told)
    assert lines[:2] == ["against old:", "  the same question"]
    search = report.search.model_copy(update={"complete": False})
    cut_short = compared_with("old", report.model_copy(update={"search": search}), report.asked)
    (first, *rest) = against_lines(told.model_copy(update={"against": cut_short}))
    assert first == "against old (cut short: the best of what it had simulated):"
    assert rest == lines[1:]
    assert f"  recommended: {report.recommended.label} -> {report.recommended.label} (the same)" in lines


@pytest.mark.parametrize("number", [1, 2, 64])
def test_some_candidates_are_there_for_clusters_of_every_size(number: int) -> None:
    tables = with_overrides(TINY, [f"cluster.accelerators={number}"])
    del tables["plan"]["generation_batch_size"], tables["plan"]["publish_every"]
    tables["cluster"].pop("generation_accelerators")
    assert best_screened(tables)
