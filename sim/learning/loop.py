"""The trainer of a policy that learns during a simulated run; the simulated cluster calls it.

Simulated time decides which rollouts are trained on and which weights sample each token; the gradient of a micro-batch
is computed when its training starts, at the weights of that version; the last micro-batch makes the optimizer step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional

from pipelinerl.config.run import PolicyConfig, RunConfig
from pipelinerl.errors import ConfigError, RunFailedError
from pipelinerl.records.reports import Reached, RewardReport, RunMeasurements
from pipelinerl.records.steps import StepRow
from pipelinerl.rl.advantages import leave_one_out
from pipelinerl.rl.ess import RatioMeans, RatioStats
from pipelinerl.rl.losses import policy_loss
from pipelinerl.scheduler.events import StartTraining, VersionSpans, WeightUpdate
from sim.learning.lookahead import LookaheadAnswers
from sim.learning.policy import PolicyShape, Weights, forward, initial_weights
from sim.learning.sampling import Sampler
from sim.learning.tasks import END, NUM_WORDS, TokenTask, checked_task, make_task
from sim.workload import named_stream

# Legend of shapes: B rollouts of a micro-batch; T positions; N flat tokens of answers.

BETAS = (0.9, 0.95)
"""Adam's decays (no unit)."""

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Mean rewards whose time is reported (no unit)."""
REACHED_STEPS = 8
"""Steps over which the mean reward is taken, to find when a level was reached (count)."""


class Learner:
    """A policy, its optimizer, and the answers it gives, of one run with the table ``policy``.

    Raises ConfigError if task and policy do not fit the run, or the base model is not finite.
    """

    def __init__(self, config: RunConfig) -> None:
        policy = config.policy
        assert policy is not None
        self._policy = policy
        self._task = checked_task(config)
        self._group_size = config.workload.group_size
        self._batch_size = config.scheduler.train_batch_size
        self.prompt_tokens = self._task.prompt_tokens
        longest_turn = config.workload.length.max
        turns = None if config.environment is None else config.environment.turns
        positions = self.prompt_tokens + longest_turn if turns is None else turns.context_max
        self._shape = policy_shape(policy, positions=positions)
        self._weights: Weights = base_model(policy, positions=positions)
        if not all(bool(torch.isfinite(one).all()) for one in self._weights.values()):
            raise ConfigError(
                "policy.warm_start.learning_rate is too large: the base model is not finite, got "
                f"learning_rate={policy.warm_start.learning_rate:g}"
            )
        for one in self._weights.values():
            one.requires_grad_()
        self._optimizer = torch.optim.Adam(self._weights.values(), lr=policy.learning_rate, betas=BETAS)
        keeps = not config.colocated and config.scheduler.weight_update is WeightUpdate.KEEP
        steps = config.scheduler.optimizer_steps_per_rl_step if config.colocated else 1
        self.answers = LookaheadAnswers(
            Sampler(
                self._shape,
                prompt_tokens=self.prompt_tokens,
                temperature=policy.temperature,
                seed=config.seed,
                keep_caches=keeps,
            ),
            task=self._task,
            seed=config.seed,
            group_size=self._group_size,
            max_tokens=positions - self.prompt_tokens,
            longest_turn=longest_turn,
            turns=turns,
            look_ahead=steps * self._batch_size,
            weights=self._snapshot(),
        )
        self._spans: dict[int, VersionSpans] = {}
        self._rewards: dict[int, float] = {}
        self._ratios = RatioStats(policy.loss)
        # Of the optimizer steps that are done: their ESS, their mean rewards, and when they were.
        self._ratio_means = RatioMeans()
        self._mean_rewards: list[float] = []
        self._times_s: list[float] = []

    # ------------------------------------------------------------------------ from the simulated cluster

    def finished(self, rollout_id: int, spans: VersionSpans) -> float:
        """Return the reward of a rollout that has its last token."""
        answer = self.answers.answer(rollout_id)
        assert answer.num_generated == spans.num_tokens  # engine and policy agree
        self._spans[rollout_id] = spans
        self._rewards[rollout_id] = float(self._task.is_right(answer.prompt, answer.word_L[: answer.length].tolist()))
        return self._rewards[rollout_id]

    def forget(self, rollout_id: int) -> None:
        """Forget a rollout that will not be trained on."""
        self.answers.forget(rollout_id)
        self._spans.pop(rollout_id, None)
        self._rewards.pop(rollout_id, None)

    def publish(self, version: int, *, oldest: int) -> None:
        """Keep the trainer's weights for the engines, as a version; no engine has one before ``oldest``."""
        self.answers.publish(version, self._snapshot(), oldest=oldest)

    def train(self, command: StartTraining) -> None:
        """Train on a micro-batch; step if it completes the batch. RunFailedError if loss or gradient is not finite."""
        rollout_ids = sorted(command.rollout_ids)  # sums do not depend on the order in which rollouts finished
        loss = self._loss(rollout_ids, command.version)
        if not math.isfinite(value := float(loss.detach())):
            raise self._diverged("the loss", value, command.version)
        loss.backward()
        for rollout_id in rollout_ids:
            self.forget(rollout_id)
        if command.completes_step:
            norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), self._policy.gradient_clip))
            if not math.isfinite(norm):
                raise self._diverged("the norm of the gradient", norm, command.version)
            self._optimizer.step()
            self._optimizer.zero_grad()

    # ------------------------------------------------------------------------------------------- results

    def take_metrics(self, row: StepRow) -> dict[str, float]:
        """Return the metrics of a finished optimizer step, and reset them."""
        metrics = {
            "reward/mean": row.reward_mean,
            "length/mean": row.length_mean,
            "lag/mean": row.lag_mean,
            "lag/max": float(row.lag_max),
            **self._ratios.metrics(),
        }
        self._ratios = RatioStats(self._policy.loss)
        self._ratio_means.add(metrics)
        self._mean_rewards.append(row.reward_mean)
        self._times_s.append(row.time_s)
        return metrics

    def summary(self) -> RunMeasurements:
        """Return the part of the report that only a learning run has."""
        rewards = self._mean_rewards
        if not rewards:
            return RunMeasurements()
        ess, mismatch = self._ratio_means.summary()
        return RunMeasurements(
            ess=ess,
            mismatch=mismatch,
            reward=RewardReport(
                first=rewards[0],
                last=_mean(rewards[-max(1, len(rewards) // 10) :]),
                max=max(rewards),
                reached=self._reached(rewards),
            ),
            weights_sha256=self.fingerprint(),
        )

    def _reached(self, rewards: Sequence[float]) -> dict[str, Reached]:
        """Return when the mean reward of the last few steps first was at each level."""
        reached: dict[str, Reached] = {}
        for step in range(REACHED_STEPS, len(rewards) + 1):
            mean = _mean(rewards[step - REACHED_STEPS : step])
            for level in LEVELS:
                if mean >= level and f"{level:g}" not in reached:
                    samples = float(step * self._batch_size)
                    reached[f"{level:g}"] = Reached(time_s=self._times_s[step - 1], samples=samples)
        return reached

    def fingerprint(self) -> str:
        """Return the SHA-256 of the trained weights."""
        digest = hashlib.sha256()
        for name in sorted(self._weights):
            digest.update(self._weights[name].detach().numpy().tobytes())
        return digest.hexdigest()

    # --------------------------------------------------------------------------------------------- parts

    def _loss(self, rollout_ids: Sequence[int], version: int) -> torch.Tensor:
        """Return the loss of a micro-batch, and take note of its importance weights."""
        answers = [self.answers.answer(rollout_id) for rollout_id in rollout_ids]
        first, longest = self.prompt_tokens, max(answer.length for answer in answers)
        word_BT = torch.zeros(len(answers), first + longest, dtype=torch.int64)
        is_token_BT = torch.zeros(len(answers), longest, dtype=torch.bool)  # False: observed
        for place, answer in enumerate(answers):
            word_BT[place, :first] = torch.tensor(answer.prompt)
            word_BT[place, first : first + answer.length] = torch.from_numpy(answer.word_L[: answer.length])
            is_token_BT[place, : answer.length] = torch.from_numpy(answer.generated_L[: answer.length])
        logit_BTV, _ = forward(self._weights, self._shape, word_BT[:, :-1])
        logprob_BTV = (logit_BTV[:, first - 1 :] / self._policy.temperature).log_softmax(-1)
        logprob_BT = logprob_BTV.gather(2, word_BT[:, first:, None])[..., 0]
        logprob_N = logprob_BT[is_token_BT]
        behaviour_logprob_N = torch.from_numpy(
            np.concatenate([one.logprob_L[: one.length][one.generated_L[: one.length]] for one in answers])
        )
        lengths = [answer.num_generated for answer in answers]
        sequence_N = torch.repeat_interleave(torch.arange(len(answers)), torch.tensor(lengths))
        log_ratio_N = logprob_N.detach() - behaviour_logprob_N
        if not bool(torch.isfinite(log_ratio_N).all()):
            raise self._diverged("an importance weight", float("nan"), version)
        self._note_ratios(rollout_ids, log_ratio_N, lengths, version)
        loss_N = policy_loss(
            self._policy.loss,
            logprob_N=logprob_N,
            behaviour_logprob_N=behaviour_logprob_N,
            advantage_N=self._advantages(rollout_ids)[sequence_N],
            sequence_N=sequence_N,
            num_sequences=len(answers),
        )
        return loss_N.sum() / self._batch_size

    def _advantages(self, rollout_ids: Sequence[int]) -> torch.Tensor:
        """Return the advantage of each rollout: groups are trained whole, so siblings stand side by side."""
        rewards = [self._rewards[rollout_id] for rollout_id in rollout_ids]
        size = self._group_size
        groups = [leave_one_out(rewards[start : start + size]) for start in range(0, len(rewards), size)]
        return torch.from_numpy(np.concatenate(groups).astype(np.float32))

    def _note_ratios(
        self, rollout_ids: Sequence[int], log_ratio_N: torch.Tensor, lengths: Sequence[int], version: int
    ) -> None:
        for rollout_id, log_ratio_T in zip(
            rollout_ids, np.split(log_ratio_N.numpy(), np.cumsum(lengths)[:-1]), strict=True
        ):
            spans = self._spans[rollout_id]
            counts = np.diff(spans.ends, prepend=0)
            self._ratios.add(log_ratio_T, version - np.repeat(spans.versions, counts))

    def _snapshot(self) -> Weights:
        return {name: one.detach().clone() for name, one in self._weights.items()}

    def _diverged(self, what: str, value: float, version: int) -> RunFailedError:
        return RunFailedError(
            f"diverged: {what} is {value} in optimizer step {version + 1}; the policy cannot learn at this lag, "
            "or policy.learning_rate is too large"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread: the matrices are small, and more threads may change the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -------------------------------------------------------------------------------------- base model

IGNORED = -100
"""Target of a position that is not learned."""


@lru_cache(maxsize=4)
def _made(policy_json: str, positions: int) -> Weights:
    config = PolicyConfig.model_validate_json(policy_json)
    task, start = make_task(config), config.warm_start
    shape = policy_shape(config, positions=positions)
    weights = initial_weights(shape, seed=start.seed % 2**63)
    for one in weights.values():
        one.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=start.learning_rate, betas=(0.9, 0.98))
    for step in range(start.steps):
        for group in optimizer.param_groups:
            group["lr"] = start.learning_rate * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / start.steps)
        word_BT, target_BT = _demonstrations(task, start.seed, step, start.batch_size)
        logit_BTV, _ = forward(weights, shape, word_BT)
        loss = functional.cross_entropy(logit_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    return {name: one.detach() for name, one in weights.items()}


def base_model(config: PolicyConfig, *, positions: int) -> Weights:
    """Return fresh copies of the weights that every run of this policy starts from; made once per process.

    They depend on task, sizes (``positions``: longest prompt and answer together, in tokens) and ``warm_start`` only.
    """
    used = config.model_copy(update={"learning_rate": 1.0, "gradient_clip": 1.0, "temperature": 1.0})
    weights = _made(used.model_dump_json(exclude={"loss"}), positions)
    return {name: one.clone() for name, one in weights.items()}


def policy_shape(config: PolicyConfig, *, positions: int) -> PolicyShape:
    """Return the sizes of a policy."""
    return PolicyShape(
        words=NUM_WORDS, positions=positions, layers=config.layers, width=config.width, heads=config.heads
    )


def _demonstrations(task: TokenTask, seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of a batch of demonstrations and the word that is to follow each, shapes [B, T]."""
    stream = named_stream(seed, "demonstrations", step)
    prompts = [task.draw(stream) for _ in range(size)]
    rows = [[*prompt, *task.demonstrate(prompt, stream)] for prompt in prompts]
    length = max(map(len, rows)) - 1
    word_BT = torch.zeros(size, length, dtype=torch.int64)
    target_BT = torch.full((size, length), IGNORED)
    for place, row in enumerate(rows):
        word_BT[place, : len(row) - 1] = torch.tensor(row[:-1])
        first = task.prompt_tokens - 1
        target_BT[place, first : len(row) - 1] = torch.tensor(row[first + 1 :])
    target_BT[word_BT == END] = IGNORED  # tokens of the environment
    return word_BT, target_BT
