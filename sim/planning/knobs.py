"""Keys of a run file that move throughput or lag and that ``plan`` does not search, each with the reason."""

from __future__ import annotations

_LEARNING = "changes what is learnt, which a planner of seconds and lag cannot weigh"
_TASK = "the task's"
NOT_SEARCHED = {
    "cluster.accelerators": "given; each verdict says what a node more would give",
    "scheduler.partial_rollouts": "`partial_rollouts` in `plan.schedulers` is the same",
    "scheduler.micro_batch_size": "moves little: it lets a waiting trainer start on a part of its batch",
    "scheduler.weight_update": f"{_LEARNING} (stale or new KV caches); the screening does not know `abort` and `wait`",
    "scheduler.on_stale": f"`drop` and `requeue` choose which answers are trained on, and so {_LEARNING}",
    "scheduler.on_full": f"`drop_oldest` chooses which answers are trained on, and so {_LEARNING}",
    "scheduler.filter_no_signal": _LEARNING,
    "scheduler.discard_limit": "ends runs that stall, and moves no other",
    "workload.group_size": _LEARNING,
    "workload.prompt_tokens": _TASK,
    "workload.success_rate": _TASK,
    "workload.length": f"{_TASK}; its limit, `max`, {_LEARNING}",
    "train.trainer.zero_stage": "must fit the trainer you have; memory and seconds follow it, so compare two plans",
    "train.trainer.pack_tokens": "as `zero_stage`; the larger the faster, as far as memory goes",
    "train.trainer.activation_checkpointing": "as `zero_stage`; without it training is faster where it fits",
    "train.transport": "`broadcast` stops neither side while weights travel; `file` is for where it cannot be had",
    "train.engine.gpu_memory_utilization": "more holds more sequences: set it as high as your engines bear",
    "hardware": "what you have, by name or in numbers; the sensitivity moves each coefficient",
}
"""Keys, or whole tables of them, that no axis searches, with the reason."""
