"""Steady state of a run in closed form, in seconds: ``plan`` screens candidates with it.

Theory of operation. ``screen`` uses means and the survivor function of the answer lengths; nothing is
drawn and nothing is queued. It reads the same hardware numbers as the simulator, which then checks the best
candidates. Let b be the sequences an engine decodes together, p the prompt, m, cv and s(l) the mean, the coefficient
of variation and the share with at least l tokens of the answers, T(b, C) a decode step with C tokens of context.

==============  ====================================================================================================
full slots      a sequence holds p + (1 + cv^2) m / 2 tokens on average; an engine makes b answers in
                m T(b, b * that) + b prefill(p) seconds; the KV cache bounds b
drain           all sequences start together: sum over l of T(h(l), h(l) (p + l)), h(l) = s(l) times their number
refill          more sequences than slots: where one ends the next begins, until all have begun. Of those begun in
                each piece of the grid of lengths s(l) are left l later; it is a drain of their sum
conventional    refill + prefill, then G optimizer steps, publication and phase switches
one step off    the longer of the two, and the publication
pipeline        the slowest of generation at full slots, training, and the bound of ``max_lag``: a rollout lives for
                at most max_lag + 1/2 steps, so (longest of B answers) * T + training <= (max_lag + 1/2) steps
                (on average; the rule itself: ``pipelinerl.scheduler.base``)
speculation     T is per token of a sequence: a step that verifies, over its mean tokens, the mean over the versions of
                a period of refreshes; a refresh adds to training
turns           an answer is all that a rollout generates, its prefill that of all turns; besides, its environment acts
                for Z seconds. Of E environments on n engines each has E/n, and as many at a time as chance has it
                (``Engines.of_rollouts``). They begin where contexts fit on the emptiest. KV caches between turns are
                dropped where they do not fit, least recent first, and at updates; a prefill holds up turns that come.
                Drain, and longest of B: of lives, tokens * T + Z of the same rollout. While it drains, T is that of the
                rollouts that still generate.
==============  ====================================================================================================

Where training is the slower, fewer slots are full, and the queue is (``docs/simulator.md``, boundary rules). Lags:
``docs/analytic.md``, with (in flight)/B = m T / step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from pipelinerl.config.environment import PrefixCaching
from pipelinerl.config.run import RunConfig, SchedulerConfig
from pipelinerl.hardware.costs import DecodeStep, PrefillConfig, ResolvedHardware, loading_s, prefill_s, training_cost
from pipelinerl.scheduler.events import WeightUpdate
from pipelinerl.scheduler.kinds import SteadyState
from pipelinerl.theory.lengths import LengthStatistics, TurnMeans
from pipelinerl.util.arrays import FloatArray

# ----------------------------------------------------------------------------------------------- engines in closed form

GRID = 17
"""Numbers of full slots for which the seconds of an answer are computed (count)."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a candidate."""

    number: int
    slots: float
    """Sequences that an engine decodes together: H, or as many as fit into the KV cache (mean)."""
    cache_tokens: float
    decode_step: DecodeStep
    prompt_s: float
    """Prefill of a prompt (seconds)."""
    dispatch_s: float
    request_s: float
    """Front end of an engine, per answer: one after the other."""
    report_s: float
    answers: LengthStatistics
    acting_s: float = 0.0
    """Seconds in which the environment of a rollout acts, without a slot."""
    reset_s: float = 0.0
    """Of these, before its first token."""
    held_up_s: float = 0.0
    """Seconds in which an answer waits at its engine for the ends of prefills that were under way when it came."""
    uneven: float = 1.0
    """Seconds of a token over its seconds in a batch of the mean size (``of_rollouts``)."""

    @property
    def front_end_s(self) -> float:
        """Front end per answer, before the engine and after the last token, without the dispatch (seconds)."""
        return self.request_s + self.report_s

    def step_s(self, batch: float) -> float:
        """Return seconds per token of a sequence in a stationary batch, the prefill of others included."""
        even_s = self.decode_step.of(batch, batch * self.answers.context) + batch / self.answers.mean * self.prompt_s
        return even_s * self.uneven

    def of_rollouts(self, each: float) -> Engines:
        """Return engines of so many rollouts each (mean), which come back to the same one turn after turn.

        A rollout is there, or for Z seconds in all with its environment. Whatever the distributions of single turns and
        gaps, of N rollouts k are there with probability p(k) ~ p(k - 1) (N - k + 1) / Z * (seconds of an answer beside
        k) / k. What an engine loses while it happens to be empty, it does not make up for while it is crowded.
        Source: Baskett, Chandy, Muntz and Palacios 1975: a station where nobody waits, and one that all share.
        """
        if not self.acting_s:
            return replace(self, slots=min(each, self.slots))
        low = math.floor(each)
        (low_slots, low_rate), (high_slots, high_rate) = self._shared(low), self._shared(low + 1)
        slots = low_slots + (each - low) * (high_slots - low_slots)
        rate = low_rate + (each - low) * (high_rate - low_rate)
        rest_s = self.dispatch_s + self.front_end_s + self.held_up_s
        uneven = (slots / rate - rest_s) / (self.answer_s(self.busy(slots)) - rest_s)
        return replace(self, slots=slots, uneven=uneven)

    def _shared(self, number: int) -> tuple[float, float]:
        if not number:
            return 0.0, 0.0
        grid = np.linspace(1.0, max(1.0, self.slots), GRID)
        slots_K = np.minimum(np.arange(1.0, number + 1), self.slots)
        answer_K = np.interp(slots_K, grid, [self.answer_s(self.busy(slots)) for slots in grid.tolist()])
        left_K = np.arange(number, 0, -1)  # with their environment, and one more
        log_p_K = np.cumsum(np.log(left_K / self.acting_s * answer_K / slots_K))
        most = max(0.0, float(log_p_K.max()))
        p_K = np.exp(log_p_K - most)
        p_K /= p_K.sum() + math.exp(-most)
        return float((p_K * slots_K).sum()), float((p_K * slots_K / answer_K).sum())

    def answer_s(self, batch: float) -> float:
        """Return seconds from one answer of a slot to the next; a freed slot misses a step."""
        return self._answer_s(self.step_s(batch))

    def _answer_s(self, step_s: float) -> float:
        tokens = self.answers.mean + self.decode_step.step_tokens
        return tokens * step_s + self.dispatch_s + self.front_end_s + self.held_up_s

    def open_over_slots(self, slots: float, *, with_tokens: bool = False) -> float:
        """Return open rollouts (``with_tokens``: only with a token) over rollouts with a slot, by full slots."""
        outside_s = self.acting_s - (self.reset_s if with_tokens else 0.0)
        return 1 + outside_s / self.answer_s(self.busy(slots)) if outside_s else 1.0

    def longest_s(self, number: int, slots: float) -> float:
        """Return the mean of the longest of so many rollouts (s), with so many slots of an engine full."""
        token_s, turns = self.step_s(self.busy(slots)), self.answers.turns
        return self.answers.longest(number) * token_s if turns is None else turns.longest_s(number, token_s)

    def busy(self, slots: float) -> float:
        """Return how many of an engine's slots are decoding on average."""
        step_s = self.step_s(slots)
        at_front_end_s, answer_s = self._at_front_end_s(slots, step_s)
        missed_s = self.decode_step.step_tokens * step_s
        return slots * (1 - (missed_s + self.dispatch_s + at_front_end_s) / answer_s)

    def sampling(self, slots: float) -> float:
        """Return how many of an engine's slots are not at its front end on average."""
        at_front_end_s, answer_s = self._at_front_end_s(slots, self.step_s(slots))
        return slots * (1 - at_front_end_s / answer_s)

    def _at_front_end_s(self, slots: float, step_s: float) -> tuple[float, float]:
        """Return an answer's seconds at the front end, queue included where that is the slowest, and all its own."""
        answer_s = self._answer_s(step_s)
        queue_s = max(0.0, slots * self.request_s - answer_s)
        return self.front_end_s + queue_s, answer_s + queue_s

    def batch_s(self, number: float, slots: float) -> float:
        """Return seconds for so many answers of all engines, each with so many slots full."""
        return number * self.answer_s(self.busy(slots)) / (self.number * slots)

    def sent_s(self, number: float) -> float:
        """Return seconds in which the front ends of all engines take so many answers, one after the other."""
        return number * self.request_s / self.number

    def phase_s(self, number: int) -> float:
        """Return seconds from the start of so many answers to the end of the last."""
        if self.answers.turns is not None:
            return self._turns_phase_s(self.answers.turns, number)
        each = number / self.number
        answers = self.answers
        peak = float((answers.share * (answers.prompt_tokens + answers.position)).max())
        fresh = min(each, self.slots, self.cache_tokens / peak)
        drain_s = self._drain_s(fresh * answers.share, number, answers.share, answers.prompt_tokens + answers.position)
        if each > fresh:
            drain_s = max(drain_s, self._refilled_s(each, number))
            drain_s = max(drain_s, self.sent_s(number) - fresh * self.request_s)
        return drain_s + each * self.prompt_s + self.dispatch_s + fresh * self.request_s + self.report_s

    def _turns_phase_s(self, turns: TurnMeans, number: int) -> float:
        """Return the phase with turns: full environments first, then a drain of lives."""
        opened = self.number * self.slots * self.open_over_slots(self.slots)

        def token_s(working: float) -> float:
            batch = working / self.number
            slots = max(1.0, min(batch, self.slots))
            return self.step_s(slots) * max(1.0, batch / slots)

        drain_s = turns.drain_s(min(opened, number), token_s, refilled=False)
        if number > opened:
            life_s = turns.lives_s(self.answer_s(self.busy(self.slots)) / self.answers.mean)
            spread = 1 + float(life_s.var() / life_s.mean() ** 2)
            full_s = self.batch_s(max(0.0, number - opened * spread / 2), self.slots)
            drain_s = max(drain_s, full_s + turns.drain_s(opened, token_s, refilled=True))
        return max(drain_s, self.sent_s(number)) + self.dispatch_s + self.front_end_s

    def _refilled_s(self, each: float, number: int) -> float:
        """Return seconds until the last of ``number`` is done; past the grid's end the batch is stationary."""
        answers, slots = self.answers, min(self.slots, each)
        rounds = each / slots
        later = max(0.0, rounds - float(answers.begun.sum()))
        begun = np.diff(np.minimum(answers.begun.cumsum(), rounds), prepend=0.0)
        begun = begun[: int(np.flatnonzero(begun)[-1]) + 1]
        full = np.asarray(np.convolve(begun, answers.share), dtype=np.float64)
        tokens = np.convolve(begun, answers.share * answers.position)
        context = answers.prompt_tokens + tokens / np.maximum(full, 1e-300)
        missed_s = (rounds - 1) * (self.answer_s(slots) - answers.mean * self.step_s(slots))
        later_s = later * answers.mean * (self.step_s(slots) - slots / answers.mean * self.prompt_s)
        return later_s + missed_s + self._drain_s(slots * full, number, np.minimum(full / rounds, 1.0), context)

    def _drain_s(self, batch: FloatArray, number: int, share: FloatArray, context: FloatArray) -> float:
        """Return seconds until the last of ``number`` is done: an engine that still has one has one at least."""
        alive = 1 - (1 - share) ** max(number, 1)
        batch = np.maximum(batch, 1.0)
        return float(self.answers.width * (alive * self.decode_step.of_all(batch, batch * context)).sum())


TOLERANCE = 1e-3
"""Relative, of the times that are found by trial."""
TURN_ROUNDS = 12
"""Trials of the share of KV caches that are kept between turns."""
DEVIATIONS = np.array([NormalDist().inv_cdf((part + 0.5) / 16) for part in range(16)])
"""Standard normal numbers of equal probability."""
LONGEST_DEVIATIONS = 3.0
"""Standard deviations of a context by which the longest is above the mean, if it may be."""
LAG_ROUNDS = 20
"""Trials of a step time that keeps to ``max_lag``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A steady state. Times are seconds per optimizer step."""

    step_tokens: float
    """Answer tokens that an optimizer step trains on."""
    step_s: float
    generation_s: float
    """Colocated: the generation phase and the switches."""
    training_s: float
    publishing_s: float
    lag_mean: float
    """Mean lag of a trained token (optimizer steps)."""
    lag_max: float
    """Largest lag of a trained token (optimizer steps)."""
    start_s: float = 0.0
    """Seconds by which a run exceeds its optimizer steps: rollouts in flight at its end are lost."""

    @property
    def tokens_per_s(self) -> float:
        """Trained answer tokens per second."""
        return self.step_tokens / self.step_s


def screen(
    config: RunConfig, hardware: ResolvedHardware, decode_step: DecodeStep, answers: LengthStatistics
) -> Estimate:
    """Estimate the steady state of a run from its tables ``cluster``, ``scheduler`` and ``workload``.

    Discarded rollouts, filtering, growth of the answers and micro-batches are left out, and ``weight_update`` is
    taken for keep or recompute; the simulator has all of it.
    """
    scheduler = config.scheduler
    capacity = math.inf if hardware.kv_cache_tokens is None else float(hardware.kv_cache_tokens)
    drafted, refresh_s = 0, 0.0
    if (speculation := config.speculation) is not None:
        drafted, refresh_s = speculation.tokens, speculation.refresh_s / (speculation.refresh_every or 1)
    slots = min(float(scheduler.generation_batch_size), capacity / (answers.context + drafted))
    engines = Engines(
        number=config.num_engines,
        slots=slots,
        cache_tokens=capacity,
        decode_step=decode_step,
        prompt_s=_prefill_s(hardware.prefill, answers.prompt_tokens),
        dispatch_s=hardware.latency.dispatch_s + hardware.latency.dispatch_jitter_s,
        request_s=hardware.latency.request_s,
        report_s=hardware.latency.report_s,
        answers=answers,
    )
    training_s = answers.training_s(
        training_cost(hardware.training, training_accelerators=config.training_accelerators),
        sequences=scheduler.train_batch_size,
        micro_batch=scheduler.micro_batch,
    )
    training_s += refresh_s
    if answers.turns is not None:
        engines = _with_turns(engines, answers.turns, config, hardware, training_s)
    schedule, times = scheduler.schedule, _Times(scheduler, training_s, hardware, engines)
    if schedule.steady_state is not None:
        return _of_its_kind(times, schedule.steady_state(times))
    if schedule.colocated:
        return _conventional(config, times)
    if schedule.has_rl_steps:
        return _one_step_off(config, times)
    return _pipeline(config, times)


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a candidate."""

    settings: SchedulerConfig
    training_s: float
    hardware: ResolvedHardware
    engines: Engines

    @property
    def loading_s(self) -> float:
        return loading_s(self.hardware.weights)

    @property
    def step_tokens(self) -> float:
        return self.settings.train_batch_size * self.engines.answers.mean

    def generation_s(self, sequences: int) -> float:
        return self.prepared_s(self.engines.phase_s(sequences), sequences)

    def prepared_s(self, generated_s: float, sequences: int) -> float:
        """Return the seconds until so many sequences, generated in ``generated_s``, are ready to be trained on."""
        latency = self.hardware.latency
        return max(generated_s, latency.rewards_s(sequences)) + latency.reward_s + latency.preprocess_s


def _of_its_kind(times: _Times, state: SteadyState) -> Estimate:
    return Estimate(
        step_tokens=times.step_tokens,
        step_s=state.step_s,
        generation_s=times.generation_s(times.settings.train_batch_size),
        training_s=times.training_s,
        publishing_s=times.hardware.weights.publish_s,
        lag_mean=state.lag_mean,
        lag_max=state.lag_max,
    )


def _with_turns(
    engines: Engines, turns: TurnMeans, config: RunConfig, hardware: ResolvedHardware, training_s: float
) -> Engines:
    """Return engines whose slots are as full as the environments keep them, and which prefill all turns."""
    environment, scheduler = config.environment, config.scheduler
    assert environment is not None  # there are turns
    most, kept, begun = engines.slots, 1.0, environment.count / engines.number
    keeps = environment.prefix_cache is not PrefixCaching.OFF
    holding = 1 - turns.reset_s / turns.acting_s if turns.acting_s else 1.0  # share of that time: contexts, no reset
    emptiest = NormalDist().inv_cdf((engines.number - 0.375) / (engines.number + 0.25))  # of engines (Blom 1958)
    rate = 0.0  # of the answers of an engine (1/s)
    for _ in range(TURN_ROUNDS):
        engines = replace(
            engines,
            slots=most,
            acting_s=turns.acting_s,
            reset_s=turns.reset_s,
            prompt_s=turns.prefill_s(hardware.prefill, kept=kept),
            held_up_s=turns.held_up_s(hardware.prefill, kept=kept, rate=rate),
            uneven=1.0,
        ).of_rollouts(begun)
        slots = engines.slots
        rate = slots / engines.answer_s(engines.busy(slots))
        fit = 0.0
        if keeps:  # a rollout begins where contexts, and the longest besides, fit (``pipelinerl.scheduler.routing``)
            longest = min(environment.turns.context_max, turns.held + turns.held_sd * LONGEST_DEVIATIONS)
            longest -= emptiest * turns.held_sd * math.sqrt(begun)  # on the emptiest engine, not the mean one
            room = engines.cache_tokens - longest - slots * turns.context
            fits = max(1.0, slots + max(0.0, room) / max(turns.held * holding, 1e-9))
            begun = (begun + min(environment.count / engines.number, fits)) / 2
            fit = _kept(turns, running=slots, idle=max(begun - slots, 0.0) * holding, room=engines.cache_tokens)
        if environment.prefix_cache is PrefixCaching.SALTED and not scheduler.schedule.colocated:
            step_s = max(training_s, engines.batch_s(scheduler.train_batch_size, slots))
            fit *= math.exp(-turns.gap_s / (step_s * scheduler.publish_every))
        kept = (kept + fit) / 2
    return engines


def _kept(turns: TurnMeans, *, running: float, idle: float, room: float) -> float:
    """Return the share of turns that find the KV cache of their rollout, by the room for it.

    Contexts differ, so the room that all rollouts of an engine need is normal, with the root of their number.
    """
    wanted, held = running * turns.context + idle * turns.held, max(idle * turns.held, 1e-9)
    sd = turns.held_sd * math.sqrt(running + idle)
    return 1.0 - float(turns.dropped(np.minimum((wanted + sd * DEVIATIONS - room) / held, 1.0)).mean())


def _conventional(config: RunConfig, times: _Times) -> Estimate:
    steps = min(config.scheduler.optimizer_steps_per_rl_step, config.optimizer_steps)
    hardware, engines, answers = times.hardware, times.engines, times.engines.answers
    number = steps * config.scheduler.train_batch_size
    carried = 0.0
    if config.scheduler.schedule.carries_over:
        # Slots stay full, and their KV caches are computed again after the RL step.
        phase_s = max(engines.batch_s(number, engines.slots), engines.sent_s(number))
        phase_s += engines.slots * _prefill_s(hardware.prefill, answers.context)
        wait = answers.group_wait * engines.step_s(engines.busy(engines.slots)) / phase_s
        carried = engines.number * engines.slots / number * answers.spread / 2 + wait  # RL steps a token is carried on
        phase_s = times.prepared_s(phase_s, number)
    else:
        phase_s = times.generation_s(number)
    idle_s = phase_s + (hardware.switch.to_training_s + hardware.switch.to_generation_s) + times.loading_s
    lag_mean, lag_max = (steps - 1) / 2 + steps * carried, steps - 1 + steps * math.ceil(2 * carried)
    max_lag = config.scheduler.max_lag
    if max_lag is not None:
        lag_mean, lag_max = min(lag_mean, max_lag), min(lag_max, max_lag)
    return Estimate(
        step_tokens=times.step_tokens,
        step_s=idle_s / steps + times.training_s,
        generation_s=(idle_s - hardware.weights.publish_s) / steps,
        training_s=times.training_s,
        publishing_s=hardware.weights.publish_s / steps,
        lag_mean=lag_mean,
        lag_max=lag_max,
    )


def _one_step_off(config: RunConfig, times: _Times) -> Estimate:
    steps = min(config.scheduler.optimizer_steps_per_rl_step, config.optimizer_steps)
    phase_s = times.generation_s(steps * config.scheduler.train_batch_size)
    return Estimate(
        step_tokens=times.step_tokens,
        step_s=(max(phase_s, steps * times.training_s) + times.loading_s) / steps,
        generation_s=(phase_s + times.loading_s) / steps,
        training_s=times.training_s,
        publishing_s=times.hardware.weights.publish_s / steps,
        lag_mean=(3 * steps - 1) / 2,
        lag_max=2 * steps - 1,
    )


def _pipeline(config: RunConfig, times: _Times) -> Estimate:
    scheduler, hardware, engines, training_s = config.scheduler, times.hardware, times.engines, times.training_s
    weights, answers = hardware.weights, engines.answers
    batch, max_lag = scheduler.train_batch_size, scheduler.max_lag
    update_s, every, more = weights.pause_s, 0, scheduler.publish_every
    if scheduler.weight_update is WeightUpdate.RECOMPUTE:
        update_s += engines.slots * _prefill_s(hardware.prefill, answers.context)
    while every < more <= config.optimizer_steps:  # nothing is published before the version before has been loaded
        every = more
        pause_s, publishing_s = update_s / every, weights.publish_s / every
        trainer_s = training_s + publishing_s
        generation_s = max(
            engines.batch_s(batch, engines.slots) + pause_s,
            engines.sent_s(batch),
            times.hardware.latency.rewards_s(batch),
        )
        step_s = max(trainer_s, generation_s)
        more = math.ceil((weights.transfer_s + update_s) / step_s * (1 - TOLERANCE)) if step_s else 0
    behind = max(0.0, weights.transfer_s - weights.publish_s) / step_s  # optimizer steps, while weights travel
    wait_s = hardware.latency.reward_s + hardware.latency.preprocess_s + engines.report_s

    def filled(step_s: float) -> float:
        """Return the slots of an engine that must be full for a batch per step."""
        return _root(lambda slots: engines.batch_s(batch, slots) + pause_s - step_s, high=engines.slots)

    full = filled(step_s) if trainer_s > generation_s else engines.slots
    if max_lag is not None:
        # From the version a rollout begins with, it has max_lag + 1 steps, the training of its own batch included; it
        # begins half a step after that version on average, but at max_lag = 0, where all begin together.
        most = max(max_lag + 0.5 - behind, 1.0)
        for _ in range(LAG_ROUNDS):
            life_s = engines.longest_s(batch, full) + pause_s + wait_s + trainer_s
            if life_s <= most * step_s * (1 + TOLERANCE):
                break
            step_s = max(trainer_s, generation_s, (step_s + life_s / most) / 2)
            full = filled(step_s)
    aging = engines.open_over_slots(full, with_tokens=True)
    in_flight = engines.number * engines.sampling(full) * aging
    queued = 0.0
    if full < engines.slots:
        most_open = max(config.num_slots, config.environment.count if config.environment else 0)
        queued = most_open + scheduler.ready_queue_limit - engines.number * full * engines.open_over_slots(full)
    decode_s = engines.step_s(engines.busy(full)) * (1 + pause_s / step_s) * aging
    after_s = answers.group_wait * decode_s + wait_s + trainer_s  # from its last token to the end of its training
    late = (every - 1) / 2 + behind  # optimizer steps that the engines are behind, on average
    lag_mean = in_flight / batch * answers.spread / 2 + queued / batch + after_s / step_s + late
    longest_s = engines.longest_s(100 * batch, full) * (1 + pause_s / step_s)
    lag_max = math.ceil(longest_s / step_s + queued / batch) + every + math.ceil(behind)
    if max_lag is not None:
        held = max_lag + 0.5 - in_flight / batch * answers.spread / 2  # all are trained when they are about that old
        lag_mean, lag_max = min(lag_mean, max(held, 0.0), float(max_lag)), min(lag_max, max_lag)
    return Estimate(
        step_tokens=times.step_tokens,
        step_s=step_s,
        generation_s=generation_s,
        training_s=training_s,
        publishing_s=publishing_s,
        lag_mean=lag_mean,
        lag_max=lag_max,
        start_s=in_flight / batch * answers.spread / 2 * step_s,
    )


def _root(function: Callable[[float], float], *, high: float) -> float:
    if function(high) > 0:
        return high
    low = 0.0
    for _ in range(16):  # to 1.5e-5 of ``high``
        middle = (low + high) / 2
        if function(middle) > 0:
            low = middle
        else:
            high = middle
    return high


def _prefill_s(prefill: PrefillConfig, tokens: float) -> float:
    return prefill_s(prefill, sequences=float(tokens > 0), tokens=tokens, squares=tokens**2)


# -------------------------------------------------------------- how often a job that fails at random should checkpoint


def daly_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints for which a job ends soonest (seconds).

    With x = checkpoint_s / (2 mtbf_s): sqrt(2 checkpoint_s mtbf_s) (1 + sqrt(x) / 3 + x / 9) - checkpoint_s, and
    ``mtbf_s`` from x = 1 on. The time of a restart does not change it.
    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22 (2006) 303-312, doi:10.1016/j.future.2004.11.016.

    Args:
        checkpoint_s: Time of a checkpoint, in which no work is done (seconds).
        mtbf_s: Mean time between failures of the whole job, exponential (seconds).
    """
    x = checkpoint_s / (2 * mtbf_s)
    if x >= 1:
        return mtbf_s
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def daly_share(every_s: float, *, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time in which a job makes progress that lasts (0 to 1).

    every_s / (mtbf_s e^(restart_s / mtbf_s) (e^((every_s + checkpoint_s) / mtbf_s) - 1)): Daly's complete model.
    ``every_s``: work between two checkpoints; the others as in ``daly_interval`` (seconds).
    """
    return every_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + checkpoint_s) / mtbf_s))
