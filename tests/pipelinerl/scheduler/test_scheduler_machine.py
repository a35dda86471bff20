"""The scheduler against a hostile but legal driver: everything that may happen does, in any order."""

import copy
import random
from dataclasses import replace

from hostile_driver import FAILING, HostileDriver
from hostile_ledger import Place, cases
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pipelinerl.scheduler.events import RolloutFinished, RolloutScored, StopReason


@settings(derandomize=True, deadline=None, max_examples=60)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_a_reward_that_comes_with_the_end_is_answered_as_one_that_follows(case, seed):
    """Each score that follows its rollout's end directly, put into that event: the same commands in the same order."""
    driver, rng = HostileDriver(case), random.Random(seed)
    for _ in range(100):
        driver.go_on(rng, num_happenings=3, failures=True)
        ends = [] if driver.stopped else driver.rollouts(Place.IN_FLIGHT)
        if ends:
            entry = rng.choice(ends)
            driver.report(entry, obey_abort=rng.random() < 0.5)
            if entry[2].place is Place.SCORING and not driver.stopped:
                driver.score(entry, float(rng.randint(0, 1)))
    scheduler = case.fresh()
    assert tuple(scheduler.start()) == driver.answers[0]
    happened = list(zip(driver.events, driver.answers[1:], strict=True))
    num_merged = 0
    while happened:
        one, answer = happened.pop(0)
        following = happened[0][0] if happened else None
        if isinstance(one, RolloutFinished) and following == RolloutScored(
            one.rollout_id, getattr(following, "reward", 0)
        ):
            one = replace(one, reward=following.reward)
            answer += happened.pop(0)[1]
            num_merged += 1
        assert tuple(scheduler.handle(one)) == answer
    event(f"more than 10 merged: {num_merged > 10}")


class SchedulerMachine(RuleBasedStateMachine):
    """Every legal order of events, for any configuration; drives itself to the end when it is over."""

    driver = None

    @initialize(case=cases())
    def begin(self, case):
        self.driver = HostileDriver(case)
        self.copies = []  # (copy of the scheduler, number of events it has seen)

    def pick(self, options, number):
        return options[number % len(options)]

    @rule(engine=st.integers(0, 2))
    def decode(self, engine):
        self.driver.decode(engine % self.driver.case.num_engines)

    @precondition(lambda self: self.driver.running())
    @rule(number=st.integers(0, 20))
    def generate_last(self, number):
        self.driver.generate_last(self.pick(self.driver.running(), number))

    @precondition(lambda self: self.driver.rollouts(Place.IN_FLIGHT))
    @rule(number=st.integers(0, 20), obey_abort=st.booleans())
    def report(self, number, obey_abort):
        self.driver.report(self.pick(self.driver.rollouts(Place.IN_FLIGHT), number), obey_abort=obey_abort)

    @precondition(lambda self: self.driver.rollouts(Place.IN_FLIGHT))
    @rule(obey_abort=st.booleans())
    def report_all(self, obey_abort):
        for entry in self.driver.rollouts(Place.IN_FLIGHT):
            self.driver.report(entry, obey_abort=obey_abort)

    @precondition(lambda self: self.driver.rollouts(Place.SCORING))
    @rule(number=st.integers(0, 20), reward=st.sampled_from([0.0, 1.0]))
    def score(self, number, reward):
        self.driver.score(self.pick(self.driver.rollouts(Place.SCORING), number), reward)

    @precondition(lambda self: self.driver.rollouts(Place.SCORING))
    @rule(rewards=st.sampled_from([(0.0, 1.0), (1.0,)]))
    def score_all(self, rewards):
        for number, entry in enumerate(self.driver.rollouts(Place.SCORING)):
            self.driver.score(entry, self.pick(rewards, number))

    @precondition(lambda self: self.driver.running())
    @rule(number=st.integers(0, 20))
    def preempt(self, number):
        self.driver.preempt(self.pick(self.driver.running(), number))

    @precondition(lambda self: self.driver.turning())
    @rule(number=st.integers(0, 20))
    def end_turn(self, number):
        self.driver.end_turn(self.pick(self.driver.turning(), number))

    @precondition(lambda self: self.driver.rollouts(Place.ACTING))
    @rule(number=st.integers(0, 20))
    def observe(self, number):
        self.driver.observe(self.pick(self.driver.rollouts(Place.ACTING), number))

    @precondition(lambda self: self.driver.answered())
    @rule(number=st.integers(0, 20))
    def end_episode(self, number):
        self.driver.end_episode(self.pick(self.driver.answered(), number))

    @precondition(lambda self: self.driver.rollouts(*FAILING))
    @rule(number=st.integers(0, 40))
    def fail(self, number):
        self.driver.fail(self.pick(self.driver.rollouts(*FAILING), number))

    @precondition(lambda self: self.driver.training)
    @rule()
    def finish_training(self):
        self.driver.finish_training()

    @precondition(lambda self: self.driver.publishing)
    @rule()
    def finish_publishing(self):
        self.driver.finish_publishing()

    @precondition(lambda self: self.driver.engines_to_load())
    @rule(number=st.integers(0, 2), all_have_arrived=st.booleans())
    def take_weights(self, number, all_have_arrived):
        engine = self.pick(self.driver.engines_to_load(), number)
        self.driver.take_weights(engine, all_have_arrived=all_have_arrived)

    @precondition(lambda self: self.driver.losable())
    @rule(number=st.integers(0, 20))
    def lose(self, number):
        self.driver.lose(self.pick(self.driver.losable(), number))

    @precondition(lambda self: self.driver.engines_to_report())
    @rule(number=st.integers(0, 2))
    def report_loaded(self, number):
        self.driver.report_loaded(self.pick(self.driver.engines_to_report(), number))

    @rule(number=st.integers(0, 100))
    def lie(self, number):
        """An impossible event is refused and changes nothing: the replay at the end knows nothing of it."""
        self.driver.lie(number)

    @precondition(lambda self: len(self.copies) < 2)
    @rule()
    def copy(self):
        self.copies.append((copy.deepcopy(self.driver.scheduler), len(self.driver.events)))

    def teardown(self):
        """A fair driver without failures brings every run to its end, and another scheduler to the same end."""
        driver = self.driver
        if driver is None or not driver.sound:
            return  # it has failed already
        driver.go_on(random.Random(0), num_happenings=10_000, failures=False)
        assert driver.stopped is StopReason.DONE or driver.config.discard_limit < 10**6
        event(f"{driver.config.kind}, {driver.stopped}")
        driver.replay()
        for scheduler, num_events in self.copies:
            answers = [tuple(scheduler.handle(one)) for one in driver.events[num_events:]]
            assert answers == driver.answers[num_events + 1 :]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
