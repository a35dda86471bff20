"""The environments of the simulated cluster: each acts before every turn of its rollout.

A rollout is here from ``OpenEnvironment`` until its last turn is generated, it fails, or is wanted no more.
"""

from __future__ import annotations

from collections.abc import Callable

from pipelinerl.config.environment import EnvironmentConfig, PrefixCaching
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.scheduler.events import (
    EnvironmentFailed,
    EnvironmentFault,
    Event,
    ObservationReady,
    RolloutFailed,
    TurnFinished,
    VersionSpans,
)
from sim.clock import CLUSTER_PRIORITY, Clock, Wake, to_ticks
from sim.episodes import NEVER, Episode, Episodes
from sim.request import PolicyAnswers, Request


class Environments:
    """The environments of a run (mutable).

    Args:
        clock: The clock of the run.
        config: What they are like.
        episodes: What each rollout generates and observes, and how long its environment acts.
        answers: Those of a policy, which decides what is generated and observed. None: ``episodes`` does.
        deliver: Reports an event to the scheduler.
        forget: Called with a rollout that has failed, before it is reported.
    """

    def __init__(
        self,
        clock: Clock,
        config: EnvironmentConfig,
        episodes: Episodes,
        *,
        answers: PolicyAnswers | None = None,
        deliver: Callable[[Event], None],
        forget: Callable[[int], None],
    ) -> None:
        self._clock = clock
        self._retries = config.retries
        self._lifetime_ticks = NEVER if config.lifetime_s is None else to_ticks(config.lifetime_s)
        self._episodes = episodes
        self._answers = answers
        self._deliver = deliver
        self._forget_rollout = forget
        self._open: dict[int, tuple[Request, Episode]] = {}

    def open(self, request: Request, prompt_id: int) -> None:
        """Draw the episode of a rollout, and have its environment made ready."""
        episode = self._episodes.episode(request.rollout_id, prompt_id)
        episode.expires_at = self._clock.now + self._lifetime_ticks
        if self._answers is None:
            request.prompt_tokens = episode.prompt_tokens
            request.finish_at(episode.ends[0])
            request.goes_on = not episode.is_last_turn
        else:
            self._answers.ask(request.rollout_id, prompt_id)
        request.keep(request.spans)
        self._open[request.rollout_id] = (request, episode)
        self._act(request, episode)

    def request(self, rollout_id: int) -> Request:
        """Return the request of a rollout, as it is to be submitted."""
        return self._open[rollout_id][0]

    def forget(self, rollout_id: int) -> None:
        """Forget a rollout, if it is here."""
        self._open.pop(rollout_id, None)

    def goes_on(self, engine: int, request: Request, spans: VersionSpans) -> bool:
        """Report the end of a turn and have the environment act, if it is not the last; return whether it is not.

        The last turn of a rollout that has lived too long is none: its environment would have to act, and fails.
        """
        rollout_id = request.rollout_id
        episode = self._open[rollout_id][1]
        if self._answers is not None and (observed := self._answers.end_turn(rollout_id)) is not None:
            episode.observed += (observed,)
            episode.ends += (spans.num_tokens + 1,)  # or later: the policy decides when the turn begins
        turn, num_turns = episode.turn + 1, len(episode.ends)
        if turn == num_turns and self._clock.now <= episode.expires_at:
            del self._open[rollout_id]
            return False
        request.spans = spans  # the rest is set when it has observed
        episode.turn = turn
        episode.num_failed = 0
        request.goes_on = turn + 1 != num_turns
        self._deliver(TurnFinished(rollout_id, engine, spans, request.take_seconds()))
        if rollout_id in self._open:
            self._act(request, episode)
        return True

    def _act(self, request: Request, episode: Episode) -> None:
        """Have the environment of a rollout act before its turn."""
        left = episode.expires_at - self._clock.now
        fails = episode.faults.get(episode.turn, ())
        if left < 0:
            ticks = 0
        elif episode.num_failed < len(fails):
            ticks, episode.fault = fails[episode.num_failed]
        else:
            ticks, episode.fault = episode.acting_ticks[episode.turn], None
        if ticks > left:
            ticks, episode.fault = max(0, left), EnvironmentFault.EXPIRED
        Wake(self._clock, ticks, CLUSTER_PRIORITY, request.rollout_id, self._acted)

    def _acted(self, wake: Wake) -> None:
        """Report what the environment has answered, or that it has failed."""
        rollout_id = wake.tag
        if rollout_id not in self._open:
            return  # it was forgotten meanwhile
        request, episode = self._open[rollout_id]
        if episode.fault is not None:
            self._failed(request, episode, episode.fault)
            return
        request.observe(episode.observed[episode.turn], episode.ends[episode.turn])
        self._deliver(ObservationReady(rollout_id, request.prompt_tokens))

    def _failed(self, request: Request, episode: Episode, fault: EnvironmentFault) -> None:
        """Report that an environment has failed, and have it act again, or report that its rollout has failed."""
        rollout_id = request.rollout_id
        again = fault is not EnvironmentFault.EXPIRED and episode.num_failed < self._retries
        self._deliver(EnvironmentFailed(rollout_id, fault, again))
        if again:
            episode.num_failed += 1
            self._act(request, episode)
        else:
            self._forget_rollout(rollout_id)
            self._deliver(RolloutFailed(rollout_id))


def check_turns(config: RunConfig) -> None:
    """Raise ConfigError if rollouts are to have turns where they cannot."""
    if config.environment is None:
        return
    if config.policy is not None and config.environment.prefix_cache is PrefixCaching.KEPT:
        raise ConfigError(
            "environment.prefix_cache must be 'salted' or 'off' with a [policy], which begins every turn on keys and "
            "values of the weights that it has then, got 'kept'"
        )
    if config.workload.length.growth != 1.0:
        raise ConfigError(
            f"workload.length.growth must be 1 with an [environment], got {config.workload.length.growth:g}"
        )
