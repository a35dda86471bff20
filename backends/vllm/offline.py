"""vLLM driven for measuring: fixed batches of fixed lengths, one after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

from backends.vllm.version.client import ENVIRONMENT
from pipelinerl.util.read import read_json

CPU_KV_CACHE_GIB = 2


class OfflineEngine:
    """One engine in this process, without one for the scheduler; in bfloat16 on GPU, float32 on CPU."""

    def __init__(self, model: Path, *, device: Literal["cpu", "gpu"], num_slots: int, max_tokens: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = f"{CPU_KV_CACHE_GIB}"
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        allowed = read_json(model / "config.json").get("max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, allowed)
        self._llm: Any = LLM(
            model=str(model),
            dtype="float32" if device == "cpu" else "bfloat16",
            enforce_eager=device == "cpu",
            max_model_len=self._max_tokens,
            max_num_seqs=num_slots,
            max_num_batched_tokens=max(8192, num_slots, self._max_tokens),
            enable_prefix_caching=True,
            disable_log_stats=True,
            skip_tokenizer_init=True,
        )
        cache = self._llm.llm_engine.vllm_config.cache_config
        self._capacity = (cache.num_gpu_blocks or 0) * cache.block_size

    def holds(self, batch: int, tokens: int) -> bool:
        """Return whether so many sequences of so many tokens run together, without preemption."""
        return bool(tokens <= self._max_tokens and batch * (tokens + 16) <= self._capacity)

    def generate_s(self, batch: int, prompt_tokens: int, new_tokens: int, *, forget: bool = True) -> float:
        """Return the seconds of a batch; prompts share no block of the cache. ``forget``: none is cached before."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        prompts = [tokens_input(_prompt(number, prompt_tokens)) for number in range(batch)]
        parameters = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=1.0, detokenize=False, seed=0)
        if forget:
            self._llm.reset_prefix_cache()
        begin_s = time.perf_counter()
        self._llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin_s

    def shutdown(self) -> None:
        """End the engine."""
        if (core := getattr(self._llm.llm_engine, "engine_core", None)) is not None:
            core.shutdown()
        del self._llm


def _prompt(number: int, tokens: int) -> list[int]:
    return [1 + number % 7, 1 + number // 7 % 7, 1 + number // 49 % 7, *[1] * tokens][:tokens]
