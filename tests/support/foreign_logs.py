"""Steps written as other systems log them, by hand: names and layouts of verl, NeMo-RL, prime-rl, slime and AReaL."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence

from calibrated import NAMED, run_of

from pipelinerl.calibration.log import LoggedStep, simulated_step
from pipelinerl.config.run import RunConfig
from sim.batch import measured_steps
from sim.workload import Workload

GENERATION, TRAINING = 2.0, 1.6
"""Times as long as the hardware model says that generation and training of the true system last."""
SLOW = {
    "kv_efficiency": 0.75 / GENERATION,
    "weight_efficiency": 0.91 / GENERATION,
    "flops_efficiency": 0.8 / GENERATION,
    "prefill_mfu": 0.6 / GENERATION,
    "step_overhead_s": 1.2e-3 * GENERATION,
    "sequence_overhead_s": 1.07e-5 * GENERATION,
    "layer_overhead_s": 4.8e-5 * GENERATION,
    "training_mfu": 0.9 / TRAINING,
    "training_step_s": 1.0 * TRAINING,
    "training_micro_batch_s": 0.1 * TRAINING,
    "activation_traffic": 19.0 * TRAINING,
}
"""The central coefficients of docs/hardware.md, so much slower."""
SIZES = (
    "scheduler={ train_batch_size = 128, generation_batch_size = 32 }",
    "workload.length={ kind = 'lognormal', mean = 1000, cv = 0.8, max = 3000 }",
)
"""One micro-batch, and answers of which one in twenty is cut: so the longest of a step hardly varies."""
PROMPT = 200.0


def true_run(*overrides: str) -> RunConfig:
    """Return a run of known hardware, which the logs are of."""
    hardware = {
        **NAMED["hardware"],
        "coefficients": SLOW,
        "weights": {"publish_s": 2.5, "pause_s": 2.5},
        "switch": {"to_training_s": 3.0, "to_generation_s": 0.0},
    }
    return run_of({**NAMED, "hardware": hardware}, *SIZES, *overrides)


def steps_of(run: RunConfig) -> list[LoggedStep]:
    """Return the steps of a simulation of it, with what a log tells of lengths."""
    rows, workload = measured_steps(run), Workload(run.workload, seed=run.seed)
    groups = [workload.group(one, one).lengths for one in range(200)]
    drawn = sorted(length for lengths in groups for length in lengths)
    known = {
        "prompt_mean": PROMPT,
        "length_p90": float(drawn[int(0.90 * len(drawn))]),
        "length_p95": float(drawn[int(0.95 * len(drawn))]),
        "length_max": float(drawn[-1]),
        "clipped_share": drawn.count(run.workload.length.max) / len(drawn),
    }
    steps = [simulated_step(run, rows[number : number + 2]) for number in range(len(rows) - 1)]
    return [step.model_copy(update={**known, "step": number}) for number, step in enumerate(steps, start=1)]


def sequences(step: LoggedStep) -> float:
    return step.tokens + step.samples * PROMPT


# ------------------------------------------------------------------------------------------------ verl


def verl_metrics(step: LoggedStep) -> dict[str, float]:
    metrics = {
        "training/global_step": step.step,
        "actor/pg_loss": -0.01,
        "timing_s/step": step.step_s,
        "timing_s/gen": step.wait_s if step.generation_s is None else step.generation_s,
        "timing_s/old_log_prob": 0.2 * step.training_s,
        "timing_s/update_actor": 0.8 * step.training_s,
        "perf/total_num_tokens": sequences(step),
        "perf/time_per_step": step.step_s,
        "perf/throughput": sequences(step) / step.step_s / 16,
        "response_length/mean": step.length_mean,
        "response_length/max": step.length_max,
        "response_length/clip_ratio": step.clipped_share,
        "prompt_length/mean": step.prompt_mean,
    }
    if step.generation_s is None:
        return {**metrics, "timing_s/param_sync": step.sync_s, "fully_async/count/current_param_version": step.step}
    return {**metrics, "timing_s/update_weights": step.sync_s}


def verl_console(steps: Sequence[LoggedStep]) -> str:
    lines = ["(TaskRunner pid=711) Training from scratch"]
    for step in steps:
        shown = " - ".join(f"{name}:{value}" for name, value in verl_metrics(step).items())
        lines.append(f"(TaskRunner pid=711) step:{step.step} - {shown} - actor/lr:np.float64(1e-06)")
    return "\n".join(lines) + "\n"


def verl_jsonl(steps: Sequence[LoggedStep]) -> str:
    return "".join(json.dumps({"step": step.step, "data": verl_metrics(step)}) + "\n" for step in steps)


def history(metrics: Callable[[LoggedStep], dict[str, float]], steps: Sequence[LoggedStep]) -> str:
    """Return what W&B's API gives as CSV: a row per call of log, cells empty that it did not hold."""
    rows = [{"_step": step.step, "_runtime": 60 * step.step, "_timestamp": 1.7e9, **metrics(step)} for step in steps]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def charts(metrics: Callable[[LoggedStep], dict[str, float]], steps: Sequence[LoggedStep]) -> str:
    """Return what the button of W&B's charts exports: columns of a run with their extremes."""
    names = list(metrics(steps[0]))
    header = ["Step", *(f"my - run - {name}{end}" for name in names for end in ("", "__MIN", "__MAX"))]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(header)
    for step in steps:
        writer.writerow([step.step, *(cell for value in metrics(step).values() for cell in (value, 0, 1e9))])
    return text.getvalue()


# --------------------------------------------------------------------------------------------- NeMo-RL


def nemo_metrics(step: LoggedStep) -> dict[str, float]:
    metrics = {
        "timing/train/total_step_time": step.step_s,
        "timing/train/policy_training": 0.7 * step.training_s,
        "timing/train/policy_and_reference_logprobs": 0.3 * step.training_s,
        "train/total_num_tokens": sequences(step),
        "train/mean_prompt_length": step.prompt_mean,
        "train/gen_tokens_per_sample/mean": step.length_mean,
        "train/gen_tokens_per_sample/max": step.length_max,
        "train/max_gen_tokens_per_turn/p95": step.length_p95,
        "performance/tokens_per_sec": sequences(step) / step.step_s,
        "performance/tokens_per_sec_per_gpu": sequences(step) / step.step_s / 16,
        "performance/generation_tokens_per_sec": 900.0,
        "performance/generation_tokens_per_sec_per_gpu": 900.0 / 8,
    }
    if step.generation_s is None:
        asynchronous = {
            "timing/train/exposed_generation": step.wait_s,
            "timing/train/weight_sync": step.sync_s,
            "train/avg_trajectory_age": step.lag_mean,
        }
        return {**metrics, **asynchronous}
    synchronous = {
        "timing/train/generation": step.generation_s,
        "timing/train/prepare_for_generation/total": step.sync_s,
    }
    return {**metrics, **synchronous}


def nemo_console(steps: Sequence[LoggedStep]) -> str:
    text = ""
    for step in steps:
        parts = {"policy_training": 0.7 * step.training_s, "policy_and_reference_logprobs": 0.3 * step.training_s}
        if step.generation_s is None:
            parts |= {"exposed_generation": step.wait_s, "weight_sync": step.sync_s}
            age = f"  • Avg Trajectory Age: {step.lag_mean:.2f} steps\n"
        else:
            parts |= {"generation": step.generation_s, "prepare_for_generation/total": step.sync_s}
            age = ""
        text += f"\n{'=' * 25} Step {step.step}/500 {'=' * 25}\n\n📊 Training Results:\n  • Loss: 0.0123\n{age}"
        text += f"  • Mean Generation Length: {step.length_mean:.4f}\n\n⏱️  Timing:\n"
        text += f"  • Total step time: {step.step_s:.2f}s\n"
        text += "".join(
            f"  • {name}: {value:.2f}s ({100 * value / step.step_s:.1f}%)\n" for name, value in parts.items()
        )
        text += f"\n🔍 Performance Metrics:\n  • Mean Total Tokens per Sample: {step.length_mean + PROMPT:.2f}\n"
        text += f"    - E2E (Samples/sec): {step.samples / step.step_s:.2f}\n"
    return text


# -------------------------------------------------------------------------------------------- prime-rl


def prime_orchestrator(step: LoggedStep) -> dict[str, float]:
    return {
        "step": step.step,
        "time/step": 0.0 if step.step == 1 else step.step_s,
        "progress/output_tokens": step.tokens,
        "train/agg/effective/num_output_tokens/mean": step.length_mean,
        "train/agg/effective/num_output_tokens/p90": step.length_p90,
        "train/agg/effective/num_output_tokens/max": step.length_max,
        "train/agg/effective/num_input_tokens/mean": step.prompt_mean,
        "off_policy/mean": step.lag_mean,
        "off_policy/max": step.lag_max,
    }


def prime_trainer(step: LoggedStep) -> dict[str, float]:
    return {
        "step": step.step,
        "time/step": step.step_s,
        "time/wait_for_batch": step.wait_s,
        "time/load_data": 0.0,
        "time/forward_backward": step.training_s,
        "time/broadcast_weights": step.sync_s,
        "perf/throughput": 8000.0,
        "perf/throughput_per_gpu": 1000.0,
    }


def lines(metrics: Callable[[LoggedStep], dict[str, float]], steps: Sequence[LoggedStep]) -> str:
    return "".join(json.dumps({"step": step.step, "time": 1.7e9, **metrics(step)}) + "\n" for step in steps)


# ----------------------------------------------------------------------------------------------- slime


def slime_console(steps: Sequence[LoggedStep]) -> str:
    text = ""
    for step in steps:
        rollout = {
            "rollout/response_len/mean": step.length_mean,
            "rollout/response_len/max": step.length_max,
            "rollout/truncated_ratio": step.clipped_share,
            "perf/rollout_time": step.step_s if step.generation_s is None else step.generation_s,
        }
        training = {
            "perf/train_wait_time": step.step_s - step.training_s,
            "perf/update_weights_time": step.sync_s,
            "perf/actor_train_time": 0.75 * step.training_s,
            "perf/train_time": step.training_s,
            "perf/actor_train_tok_per_s": sequences(step) / (0.75 * step.training_s),
            "perf/step_time": step.step_s,
        }
        text += f"[2026-08-21 17:14:19] rollout_metrics.py:268 - perf {step.step}: {rollout}\n"
        text += f"[2026-08-21 17:14:19] train_metric_utils.py:135 - rollout {step.step}: "
        text += f"{ {'rollout/total_lengths': step.length_mean + PROMPT, 'rollout/rewards': float('nan')} }\n"
        text += f"[2026-08-21 17:14:20] train_metric_utils.py:401 - perf {step.step}: {training}\n"
    return text


# ----------------------------------------------------------------------------------------------- AReaL


def areal_metrics(step: LoggedStep) -> dict[str, float]:
    return {
        "timeperf/rollout": step.wait_s if step.generation_s is None else step.generation_s,
        "timeperf/recompute_logp": 0.1 * step.training_s,
        "timeperf/train_step": 0.9 * step.training_s,
        "timeperf/update_weights": step.sync_s,
        **areal_lengths(step),
    }


def areal_lengths(step: LoggedStep) -> dict[str, float]:
    return {
        "ppo_actor/n_seqs": step.samples,
        "ppo_actor/prompt_len/avg": step.prompt_mean,
        "ppo_actor/seq_len/avg": step.length_mean + step.prompt_mean,
        "ppo_actor/seq_len/max": step.length_max + step.prompt_mean,
        "ppo_actor/no_eos_ratios/avg": step.clipped_share,
        "ppo_actor/update/version_stats/sample_staleness_theta_avg": step.lag_mean,
        "ppo_actor/update/version_stats/sample_staleness_theta_max": step.lag_max,
    }


def areal_console(steps: Sequence[LoggedStep]) -> str:
    text = ""
    for step in steps:
        text += f"\x1b[32m20260521-18:37:16 StatsLogger INFO: Train step {step.step}/400 done.\x1b[0m\n╒═══╤═══╕\n"
        cells = [f" {name:50} │ {value:.4e} " for name, value in areal_metrics(step).items()]
        text += "".join(f"│{'│'.join(cells[first : first + 2])}│\n├───┼───┤\n" for first in range(0, len(cells), 2))
    return text


def areal_trace(steps: Sequence[LoggedStep], rank: int = 0) -> str:
    names = {
        "timeperf/rollout": "train.rollout",
        "timeperf/recompute_logp": "train.recompute_logp",
        "timeperf/train_step": "train.ppo_update",
        "timeperf/update_weights": "train.update_weights",
    }
    text = json.dumps({"name": "process_name", "ph": "M", "pid": 7, "tid": 1, "args": {"name": "rank 0"}}) + "\n"
    for step in steps:
        for key, name in names.items():
            micros = int(1e6 * areal_metrics(step)[key]) - 1000 * rank
            event = {"name": name, "ph": "X", "ts": 0, "dur": micros, "pid": 7, "tid": 1, "cat": "compute"}
            text += json.dumps({**event, "args": {"global_step": step.step, "rank": rank}}) + "\n"
    return text


# ----------------------------------------------------------------------------------------------- plain


def plain(steps: Sequence[LoggedStep]) -> str:
    names = ("step", "step_s", "generation_s", "training_s", "sync_s", "wait_s", "samples", "length_mean", "length_p95",
             "length_max", "prompt_mean", "lag_mean", "lag_max")  # fmt: skip
    rows = [",".join("" if getattr(one, name) is None else str(getattr(one, name)) for name in names) for one in steps]
    return "\n".join([",".join(names), *rows]) + "\n"
