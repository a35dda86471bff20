"""Decode steps of an engine added up: by hand."""

from __future__ import annotations

from backends.vllm.decode_steps import StepMeter, Worked
from pipelinerl.records.reports import DecodeSteps


def sums(
    steps: int, sequences: int, context: int, started: int, read_tokens: int, seconds: float, sent: int = 0
) -> DecodeSteps:
    return DecodeSteps(
        steps=steps,
        sequences=sequences,
        context=context,
        started=started,
        read_tokens=read_tokens,
        sent=sent,
        seconds=seconds,
    )


def test_steps_are_added_up_with_what_was_in_them() -> None:
    """Two prompts of 5; a third of 7 joins the second step; in the third one of three ends."""
    meter = StepMeter()
    meter.begins(5)
    meter.begins(5)
    meter.output(1.0, 2, 0)  # nobody knows when it began
    meter.begins(7)
    meter.output(1.5, 2, 0)
    meter.output(1.5, 1, 0)  # the same step
    meter.output(1.75, 3, 1)
    meter.ends(5 + 3)
    meter.output(2.0, 2, 0)
    # The last step is still open. Contexts: 5 + 1 twice and 7; then a token more each.
    assert meter.take() == sums(2, 6, (6 + 6 + 7) + (7 + 7 + 8), 1, 7, 0.75, sent=1)
    meter.output(2.5, 2, 2)
    assert meter.take() == sums(1, 2, 8 + 9, 0, 0, 0.25)  # of the two that are left


def test_a_request_counts_in_the_step_in_which_it_is_sent_and_as_begun_in_that_after_it() -> None:
    """The engine takes it up between the two: the step in which it is sent goes on with what is in it."""
    meter = StepMeter()
    meter.begins(4)
    meter.output(1.0, 1, 0)
    for end_s, num_sent, num in ((2.0, 3, 1), (3.0, 1, 4), (4.0, 0, 5), (5.0, 0, 5)):
        for _ in range(num_sent):
            meter.begins(4)
        meter.output(end_s, num, 0)
        taken = meter.take()
        expected = {2.0: (0, 0), 3.0: (3, 0), 4.0: (1, 3), 5.0: (0, 1)}  # a step is added once the next one has ended
        assert (taken.sent, taken.started) == expected[end_s]


def test_neither_a_pause_nor_idle_time_is_a_step() -> None:
    meter = StepMeter()
    meter.begins(4)
    for end_s in (1.0, 2.0):
        meter.output(end_s, 1, 0)
    meter.stop()
    meter.output(50.0, 1, 0)  # after the pause
    meter.output(51.0, 1, 1)
    meter.output(90.0, 1, 0)  # nothing was in progress before it
    meter.output(92.0, 1, 0)
    meter.stop()
    taken = meter.take()
    assert (taken.steps, taken.seconds) == (3, 1.0 + 1.0 + 2.0)


def test_sums_add_up() -> None:
    assert sums(1, 2, 3, 4, 5, 6.0, 7) + sums(10, 20, 30, 40, 50, 60.0, 70) == sums(11, 22, 33, 44, 55, 66.0, 77)


def test_processor_time_is_that_from_the_end_of_one_step_to_the_end_of_the_next() -> None:
    """Two steps of one sequence, and one after a pause that counts for nothing."""
    meter = StepMeter()
    meter.begins(4)
    for end_s, worked in ((1.0, (0.5, 0.25)), (2.0, (1.0, 0.5)), (4.0, (2.5, 0.75))):
        meter.output(end_s, 1, 0, Worked(*worked))
    meter.stop()
    for end_s, worked in ((50.0, (9.0, 9.0)), (51.0, (10.0, 9.125))):
        meter.output(end_s, 1, 0, Worked(*worked))
    meter.stop()
    taken = meter.take()
    assert (taken.engine_worked_s, taken.front_end_worked_s) == (0.5 + 1.5 + 1.0, 0.25 + 0.25 + 0.125)
