"""Which metric of which system is which column of a logged step.

Every name was read in the source of the project; each format says in which files. A column has alternatives in order of
preference; the metrics of one alternative are added up, and it counts if its first metric is there. A metric of a log
matches by its whole name or by its end after a slash, since some systems put a scope before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Alternatives = tuple[tuple[str, ...], ...]

NUMBER = r"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
NUMPY = r"(?:np\.\w+\()?"
"""What NumPy 2 prints before a number in a dictionary."""
DURATION = r"(\d[\d.]*(?:ms|[dhms])(?: \d+[hms])?)"
"""Seconds in units: 15m 56s."""


@dataclass(frozen=True, slots=True)
class Format:
    """What the log of a system looks like."""

    name: str
    """As ``--from`` has it."""
    steps: tuple[str, ...]
    """Columns of an export that number the steps, the best first."""
    columns: Mapping[str, Alternatives]
    """Metrics by column of ``LoggedStep``."""
    ratios: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """Columns that are a product of metrics over a product of others."""
    asynchronous: tuple[str, ...] = ()
    """Metrics that only an asynchronous job has, or has above 0."""
    asynchronous_columns: Mapping[str, Alternatives] = field(default_factory=dict)
    """Columns that mean something else there."""
    console_step: re.Pattern[str] | None = None
    """A line of the console that begins a step; its group is the number."""
    console: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Numbers of a line, and the metric each is: ``{0}`` stands for the first group, the last group is the value."""
    console_wraps: re.Pattern[str] | None = None
    """A line's end that a terminal put in, not the system."""
    besides: tuple[str, ...] = ()
    """Seconds that are no part of a step, though some versions count them in it: evaluation, checkpoint."""


VERL = Format(
    name="verl",
    steps=("training/global_step", "_step", "step"),
    columns={
        "step_s": (("timing_s/step",), ("perf/time_per_step",)),
        "generation_s": (("timing_s/gen",),),
        "training_s": (
            ("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/ref", "timing_s/values", "timing_s/adv",
             "timing_s/update_critic"),
        ),
        "sync_s": (("timing_s/update_weights",), ("timing_s/sync_rollout_weights",), ("timing_s/param_sync",)),
        "total_tokens": (("perf/total_num_tokens",),),
        "length_mean": (("response_length/mean",),),
        "length_max": (("response_length/max",),),
        "clipped_share": (("response_length/clip_ratio",),),
        "prompt_mean": (("prompt_length/mean",),),
    },
    ratios={"accelerators": (("perf/total_num_tokens",), ("perf/throughput", "perf/time_per_step"))},
    asynchronous=("fully_async/count/current_param_version", "timing_s/generate_async", "timing_s/param_sync"),
    asynchronous_columns={"wait_s": (("timing_s/gen",),), "generation_s": (("timing_s/generate_async",),)},
    console_step=re.compile(r"\bstep:(\d+) - "),
    console=((re.compile(rf" - ([^\s:]+):{NUMPY}{NUMBER}"), "{0}"),),
    console_wraps=re.compile(r"(?<=\S)\n(?!\(|[^\n]*\bstep:\d+ - )(?=[^\n]* - [\w.@-]+/[\w/.@-]+:)"),
    besides=("timing_s/testing", "timing_s/save_checkpoint"),
)  # fmt: skip
"""volcengine/verl, March 2025 to January 2026: ``verl/trainer/ppo/metric_utils.py``,
``verl/trainer/ppo/ray_trainer.py``, console in ``verl/utils/logger/aggregate_logger.py``, JSONL in
``verl/utils/tracking.py``; asynchronous in ``verl/experimental/one_step_off_policy/ray_trainer.py`` and
``verl/experimental/fully_async_policy/``."""

NEMO_RL = Format(
    name="nemo-rl",
    steps=("_step", "step"),
    columns={
        "step_s": (("timing/train/total_step_time",),),
        "generation_s": (("timing/train/generation",),),
        "wait_s": (("timing/train/exposed_generation",),),
        "training_s": (
            ("timing/train/policy_training", "timing/train/policy_and_reference_logprobs",
             "timing/train/training_prep", "timing/train/logprob_inference_prep",
             "timing/train/advantage_calculation"),
        ),
        "sync_s": (("timing/train/weight_sync",), ("timing/train/prepare_for_generation/total",)),
        "total_tokens": (("train/total_num_tokens",),),
        "samples_per_s": (("performance/samples_per_sec",),),
        "length_mean": (("train/mean_gen_tokens_per_sample",), ("train/gen_tokens_per_sample/mean",)),
        "length_p95": (("train/max_gen_tokens_per_turn/p95",),),
        "length_max": (("train/gen_tokens_per_sample/max",), ("train/max_gen_tokens_per_sample",)),
        "clipped_share": (("train/truncation_rate",),),
        "prompt_mean": (("train/mean_prompt_length",),),
        "sequence_mean": (("train/mean_total_tokens_per_sample",), ("train/total_tokens_per_sample/mean",)),
        "lag_mean": (("train/avg_trajectory_age",),),
    },
    ratios={
        "accelerators": (("performance/tokens_per_sec",), ("performance/tokens_per_sec_per_gpu",)),
        "generation_accelerators": (
            ("performance/generation_tokens_per_sec",), ("performance/generation_tokens_per_sec_per_gpu",),
        ),
    },
    console_step=re.compile(r"={5,} Step (\d+)/"),
    console=(
        (re.compile(rf"• Total step time: {NUMBER}s"), "timing/train/total_step_time"),
        (re.compile(rf"• ([a-z][\w/]*): {NUMBER}s \("), "timing/train/{0}"),
        (re.compile(rf"• Mean Generation Length: {NUMBER}"), "train/mean_gen_tokens_per_sample"),
        (re.compile(rf"• Mean Total Tokens per Sample: {NUMBER}"), "train/mean_total_tokens_per_sample"),
        (re.compile(rf"• Avg Trajectory Age: {NUMBER}"), "train/avg_trajectory_age"),
        (re.compile(rf"- E2E \(Samples/sec\): {NUMBER}"), "performance/samples_per_sec"),
        (re.compile(rf"- E2E \(Tokens/sec\): {NUMBER}"), "performance/tokens_per_sec"),
        (re.compile(rf"- E2E \(Tokens/sec/gpu\): {NUMBER}"), "performance/tokens_per_sec_per_gpu"),
        (re.compile(rf"- Generation Worker Group \(Tokens/sec\): {NUMBER}"), "performance/generation_tokens_per_sec"),
        (
            re.compile(rf"- Generation Worker Group \(Tokens/sec/gpu\): {NUMBER}"),
            "performance/generation_tokens_per_sec_per_gpu",
        ),
    ),
    besides=("timing/train/checkpointing",),
)  # fmt: skip
"""NVIDIA-NeMo/RL, August 2026: ``nemo_rl/algorithms/grpo.py`` (timers, console), ``nemo_rl/algorithms/utils.py``
(performance), ``nemo_rl/experience/rollouts.py`` and ``rollout_manager.py`` (lengths)."""

PRIME_RL = Format(
    name="prime-rl",
    steps=("step", "_step"),
    columns={
        "step_s": (("time/step",),),
        "wait_s": (("time/wait_for_batch",),),
        "training_s": (("time/forward_backward", "time/load_data"),),
        "sync_s": (("time/broadcast_weights",),),
        "tokens": (("progress/output_tokens",), ("progress/decode_tokens",)),
        "samples": (("progress/samples",),),
        "length_mean": (("train/agg/effective/num_output_tokens/mean",), ("decode_len/mean",)),
        "length_p90": (("train/agg/effective/num_output_tokens/p90",),),
        "length_max": (("train/agg/effective/num_output_tokens/max",),),
        "clipped_share": (("is_truncated/mean",),),
        "prompt_mean": (("train/agg/effective/num_input_tokens/mean",), ("prefill_len/mean",)),
        "sequence_mean": (("seq_len/mean",),),
        "lag_mean": (("off_policy/mean",),),
        "lag_max": (("console/async_level", "off_policy/max"), ("off_policy/max",)),
    },
    ratios={
        "training_accelerators": (("perf/throughput",), ("perf/throughput_per_gpu",)),
        "total_tokens": (("console/throughput", "time/step"), ()),
    },
    console_step=re.compile(r"\bStep (\d+) \|"),
    console=(
        (re.compile(rf"\bStep \d+ \|(?: Time:)?\s+{DURATION} \|"), "time/step"),
        (re.compile(rf"Throughput: {NUMBER} tokens/s \| Seq"), "console/throughput"),
        (re.compile(rf"Seq\. Length: {NUMBER} tokens/sample"), "seq_len/mean"),
        (re.compile(rf"\| Async Level: {NUMBER}"), "console/async_level"),
        (re.compile(rf"\| Max\.? Off-Policy(?: Level:)? {NUMBER}"), "off_policy/max"),
    ),
)
"""PrimeIntellect-ai/prime-rl, December 2025 to August 2026: ``src/prime_rl/trainer/rl/train.py``,
``src/prime_rl/orchestrator/orchestrator.py``, ``src/prime_rl/orchestrator/metrics.py``; JSONL in
``src/prime_rl/monitors/file.py``. Trainer and orchestrator write a file each: give both."""

SLIME = Format(
    name="slime",
    steps=("rollout/step", "_step", "step"),
    columns={
        "step_s": (("perf/step_time",), ("perf/total_train_time",)),
        "generation_s": (("perf/rollout_time",),),
        "training_s": (("perf/train_time",),),
        "sync_s": (("perf/update_weights_time",),),
        "length_mean": (("rollout/response_len/mean",), ("rollout/response_lengths",)),
        "length_max": (("rollout/response_len/max",),),
        "clipped_share": (("rollout/truncated_ratio",), ("rollout/truncated",)),
        "sequence_mean": (("rollout/total_lengths",),),
    },
    ratios={"total_tokens": (("perf/actor_train_tok_per_s", "perf/actor_train_time"), ())},
    console_step=re.compile(r"\b(?:perf|rollout) (\d+): \{"),
    console=((re.compile(rf"'([\w/.@-]+)': {NUMPY}{NUMBER}"), "{0}"),),
)  # fmt: skip
"""THUDM/slime, September 2025 to August 2026: ``slime/observability/train_metric_utils.py``,
``slime/observability/rollout_metrics.py``, timers in ``slime/backends/megatron_utils/actor.py``; the older names in
``slime/utils/train_metric_utils.py``."""

AREAL_PARTS = (
    "timeperf/train_step", "timeperf/recompute_logp", "timeperf/ref_logp", "timeperf/teacher_logp",
    "timeperf/critic_values", "timeperf/critic_train_step", "timeperf/compute_advantage",
)  # fmt: skip
TRACED_PARTS = (
    "train.ppo_update", "train.recompute_logp", "train.ref_logp", "train.teacher_logp", "train.compute_values",
    "train.critic_ppo_update", "train.compute_advantage",
)  # fmt: skip
AREAL = Format(
    name="areal",
    steps=("_step", "step"),
    columns={
        "step_s": (
            ("timeperf/rollout", *AREAL_PARTS, "timeperf/update_weights", "timeperf/clear_batches"),
            ("train.rollout", *TRACED_PARTS, "train.update_weights", "train.clear_batches"),
        ),
        "generation_s": (("timeperf/rollout",), ("train.rollout",)),
        "training_s": (AREAL_PARTS, TRACED_PARTS),
        "sync_s": (("timeperf/update_weights",), ("train.update_weights",)),
        "samples": (("ppo_actor/n_seqs",),),
        "prompt_mean": (("ppo_actor/prompt_len/avg",),),
        "sequence_mean": (("ppo_actor/seq_len/avg",),),
        "sequence_max": (("ppo_actor/seq_len/max",),),
        "clipped_share": (("ppo_actor/no_eos_ratios/avg",),),
        "lag_mean": (("version_stats/sample_staleness_theta_avg",),),
        "lag_max": (("version_stats/sample_staleness_theta_max",),),
    },
    asynchronous=("version_stats/sample_staleness_theta_max",),
    asynchronous_columns={"wait_s": (("timeperf/rollout",), ("train.rollout",)), "generation_s": ()},
    console_step=re.compile(r"Train step (\d+)/\d+ done"),
    console=((re.compile(rf"│\s*([\w/-]+)\s*│\s*{NUMBER}\s*(?=│)"), "{0}"),),
)
"""inclusionAI/AReaL, May 2026: ``areal/trainer/rl_trainer.py`` (timers and trace), ``areal/trainer/ppo/actor.py``
(lengths, staleness), console in ``areal/utils/printing.py``, traces in ``areal/utils/perf_tracer.py``. Its trace has no
lengths: give it together with another export."""

FORMATS = (VERL, NEMO_RL, PRIME_RL, SLIME, AREAL)
"""All systems whose logs are read."""
PLAIN = "csv"
"""The name of a plain CSV file with the columns of ``LoggedStep``."""
