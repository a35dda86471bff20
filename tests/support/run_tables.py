"""Run files for tests: a small one, one with every key, and the lines for the faults of one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.run import RunConfig, parse_run, with_overrides
from pipelinerl.errors import ConfigError

TINY = """
optimizer_steps = 6

[cluster]
accelerators = 4
generation_accelerators = 2

[scheduler]
train_batch_size = 8
generation_batch_size = 16

[workload]
length = { kind = "uniform", max = 64 }

[hardware]
decode = { kind = "affine", step_s = 0.01 }
training = { token_s = 1e-4 }
"""

ROOFLINE = {
    "kind": "roofline", "peak_flops": 9.89e14, "bandwidth": 3.35e12, "parameters_read": 7.1e9,
    "parameters_active": 7.1e9, "bytes_per_parameter": 1.0, "kv_bytes_per_token": 57344.0, "experts": 128,
    "experts_per_token": 8, "expert_parameters": 6e9, "weight_efficiency": 0.8, "kv_efficiency": 0.8,
    "flops_efficiency": 0.6, "step_overhead_s": 0.001, "sequence_overhead_s": 1e-5,
}  # fmt: skip

SPECULATION = {
    "method": "eagle3", "tokens": 3, "acceptance": 0.7, "decay": 0.99, "refresh_every": 20, "refresh_s": 5.0,
    "draft_cost": 0.05, "off_above": 64, "model": "/somewhere/drafter",
}  # fmt: skip
EVERY_KEY: dict[str, Any] = {
    "seed": 7, "optimizer_steps": 20,
    "cluster": {"accelerators": 16, "generation_accelerators": 8, "tensor_parallel": 2},
    "scheduler": {
        "kind": "pipeline", "train_batch_size": 32, "generation_batch_size": 64, "optimizer_steps_per_rl_step": 4,
        "publish_every": 1, "partial_rollouts": False, "micro_batch_size": 16, "max_lag": 5,
        "weight_update": "recompute", "on_stale": "drop", "ready_queue_size": 48, "on_full": "drop_oldest",
        "admission": {"soft": 0.7, "hard": 0.95}, "routing": "sticky",
        "filter_no_signal": True, "discard_limit": 1000,
    },
    "workload": {
        "group_size": 4, "prompt_tokens": 100, "success_rate": 0.25,
        "length": {"kind": "empirical", "max": 900, "mean": 300.0, "cv": 0.5, "source": "skythought", "growth": 1.5},
    },
    "environment": {
        "count": 64, "reset_s": 10.0, "reset_cv": 0.5, "step_s": 2.0, "step_cv": 1.5, "step_max_s": 60.0,
        "failure_rate": 0.01, "reset_hang_rate": 0.001, "step_hang_rate": 0.0001, "retries": 2, "lifetime_s": 900.0,
        "reset_timeout_s": 100.0, "step_timeout_s": 20.0, "prefix_cache": "kept",
        "turns": {
            "kind": "recorded", "source": "agent_turns", "mean": 10.0, "cv": 0.5, "group_share": 0.5, "max": 30,
            "observation_tokens": 100.0, "observation_cv": 1.0, "observation_max": 500, "context_max": 1000,
        },
    },
    "hardware": {
        "gpu": "H100", "generation_gpu": "H20", "model": "Qwen2.5-7B", "level": "optimistic",
        "engine": "vllm-0.24", "software": "verl", "weight_sync": "reshard",
        "engine_weights": "fp8", "kv_cache": "fp8", "step_tokens": 8192, "coefficients": {"training_mfu": 0.31},
        "decode": {"kind": "affine", "step_s": 0.01, "sequence_s": 0.001, "context_token_s": 1e-7},
        "prefill": {"sequence_s": 0.001, "token_s": 1e-5, "token_squared_s": 1e-10}, "kv_cache_tokens": 1000,
        "training": {
            "token_s": 1e-4, "token_squared_s": 1e-9, "step_s": 0.5, "micro_batch_s": 0.1,
            "sequence_accelerators": 2,
        },
        "weights": {"publish_s": 0.1, "transfer_s": 0.2, "pause_s": 0.3},
        "switch": {"to_training_s": 1.0, "to_generation_s": 2.0},
        "latency": {
            "dispatch_s": 0.01, "dispatch_jitter_s": 0.02, "request_s": 0.001, "report_s": 0.05, "reward_s": 0.03,
            "reward_workers": 8, "preprocess_s": 0.04,
        },
    },
    "engine": {
        "speculation": SPECULATION,
    },
    "generation": {"prefill": 1, "decode": 3, "transfer_s": 0.01, "transfer_token_s": 1e-6, "cache_tokens": 9000},
    "fleet": {
        "start_s": 90.0, "keep_tokens": False, "stream_tokens": 128,
        "groups": [
            {
                "name": "ours", "kind": "reserved", "engines": 1, "gpu": "H20", "price_per_hour": 2.0,
                "mtbf_hours": 50000.0, "repair_s": 3600.0, "reclaim_hours": None, "away_s": None, "notice_s": None,
                "capacity": None, "switch_s": None, "stragglers": 0.05, "slowdown": 1.5,
            },
            {
                "name": "spot", "kind": "spot", "engines": 1, "reclaim_hours": 8.0, "away_s": 1800.0, "notice_s": 30.0,
                "repair_s": 0.0, "stragglers": 0.0,
            },
            {
                "name": "recorded", "kind": "spot", "engines": 1, "capacity": "/somewhere/spot.csv", "repair_s": 600.0,
                "stragglers": 0.0,
            },
        ],
        "trainer": {"mtbf_hours": 50000.0, "checkpoint_every_s": 1800.0, "checkpoint_s": 20.0, "restart_s": 300.0},
    },
    "faults": [
        {
            "kind": "slow", "engine": 1, "rank": None, "step": 5, "second": None, "seconds": 10.0, "factor": 3.0,
        },
        {"kind": "kill", "rank": 7, "second": 12.5},
    ],
    "policy": {
        "task": "reverse", "size": 12, "layers": 3, "width": 24, "heads": 2, "temperature": 0.9,
        "learning_rate": 3e-4, "gradient_clip": 0.5,
        "loss": {
            "kind": "cispo", "truncation": 2.0, "clip_low": 0.1, "clip_high": 0.3,
            "mask": "geometric", "mask_low": 0.9, "mask_high": 2.2, "kl_coefficient": 0.0,
            "value_coefficient": 0.0, "teacher": None,
        },
        "warm_start": {"steps": 7, "batch_size": 8, "learning_rate": 1e-3, "seed": 3},
    },
    "drift": {"exponent": 1.5, "rates": [0.01, 0.02]},
    "compare": {
        "arms": [{"name": "as it is", "set": []}, {"name": "lag 1", "set": ["scheduler.max_lag=1"]}],
        "scenarios": [{"name": "slow", "set": ["hardware.training.token_s=1e-3"]}], "baseline": "lag 1",
        "seeds": [3, 5],
    },
    "price": {"gpu_hour": 2.5, "generation_gpu_hour": 1.0, "environment_hour": 0.1},
    "plan": {
        "schedulers": ["pipeline", "one_step_off"], "generation_accelerators": [2, 4], "tensor_parallel": [1, 2],
        "generation_batch_size": [8, 16], "optimizer_steps_per_rl_step": [2, 4], "publish_every": [1, 2],
        "environments": [4, 8], "sequence_parallel": [1, 2], "train_batch_size": [16], "ready_queue_size": [32],
        "max_lag": [0, 4], "lag_limit": 8,
        "mean_lag_limit": 3.5, "min_ess": 0.5, "gpu_hours": 100.0, "budget": 300.0, "risk": "averse", "simulate": 4,
        "simulate_steps": 10, "mtbf_hours": 50_000.0, "lend_switch_s": 20.0, "speculate": SPECULATION,
        "spot": {"price_per_hour": 1.2, "reclaim_hours": 8.0, "away_s": 600.0, "notice_s": 20.0},
    },
    "train": {
        "device": "cpu", "ray_address": "auto", "transport": "file", "weights_folder": "/dev/shm",
        "model": {"path": "/models/tiny", "chat_template": False}, "lora": {"rank": 8, "alpha": 16},
        "task": {
            "name": "arithmetic", "settings": {"largest_operand": 9}, "max_prompt_tokens": 16, "overlong_tokens": 4,
            "reward_timeout_s": 5.0, "reward_workers": 2,
        },
        "sampling": {"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "stop": ["\n\n"]},
        "optimizer": {
            "learning_rate": 1e-4, "schedule": "cosine", "warmup_steps": 5, "beta1": 0.8, "beta2": 0.99,
            "weight_decay": 0.1, "gradient_clip": 0.3,
        },
        "loss": {
            "kind": "ppo", "truncation": 2.0, "clip_low": 0.1, "clip_high": 0.3,
            "mask": "token", "mask_low": 0.25, "mask_high": 4.0, "kl_coefficient": 0.01,
            "value_coefficient": 0.5, "teacher": None,
        },
        "trainer": {
            "kind": "deepspeed", "zero_stage": 3, "expert_parallel": 1, "pack_tokens": 2048, "sequence_parallel": 2,
            "activation_checkpointing": True, "fused": True, "router_replay": False, "start_timeout_s": 90.0,
            "step_timeout_s": 61.0, "collective_timeout_s": 30.0, "restarts": 1,
        },
        "placement_timeout_s": 30.0,
        "engine": {
            "kind": "vllm", "gpu_memory_utilization": 0.5, "cpu_kv_cache_gib": 2, "start_timeout_s": 100.0,
            "update_timeout_s": 10.0, "generate_timeout_s": 20.0, "restarts_per_hour": 1,
            "vllm": {"kv_cache_dtype": "fp8"},
        },
        "checkpoint": {"every": 10, "keep": 3, "export_every": 20},
        "evaluation": {
            "problems": 50, "every": 5, "temperature": 0.5, "max_tokens": 90, "settings": {"operators": "+"},
        },
        "logging": {"wandb_project": "lag"},
    },
}  # fmt: skip
"""A valid run file with every key but those of the other two kinds of decode."""

DECODES = (
    EVERY_KEY["hardware"]["decode"],
    ROOFLINE,
    {"kind": "utilisation", "flash_s": 15.4e-6, "table": "/somewhere/curve.csv"},
)


def tiny(*overrides: str) -> RunConfig:
    return parse_run(with_overrides(tomllib.loads(TINY), overrides))


def faults(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run(data)
    return str(caught.value).splitlines()


def tiny_faults(*overrides: str) -> list[str]:
    return faults(with_overrides(tomllib.loads(TINY), overrides))


def run_file(folder: Path, text: str = TINY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path
