"""What is asked of vLLM for an answer, and the form of its answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from backends.interface import Generated, GenerateRequest
from pipelinerl.errors import BackendError
from pipelinerl.scheduler.events import VersionSpans


def sampling_parameters(request: GenerateRequest) -> Any:
    """Return vLLM's parameters of a request.

    With its ``processed_logprobs`` the log-probabilities are those of the distribution sampled from: after temperature,
    and among the words that ``top_k``, ``top_p`` and ``min_p`` leave.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        stop=list(request.stop),
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_generated(output: Any) -> Generated:
    """Turn vLLM's last output of a request into ours.

    Raises:
        BackendError: If it did not end as it should, or its spans or log-probabilities do not cover its tokens.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in {"stop", "length", "abort"}:
        raise BackendError(f"generation failed: rollout={output.request_id} ended with {completion.finish_reason}")
    tokens, flat = list(completion.token_ids), completion.logprobs
    if tokens and list(flat.token_ids) != tokens:  # of each position the sampled token, and no other
        raise BackendError(f"generation failed: rollout={output.request_id} has log-probabilities of other tokens")
    return Generated(
        tokens_T=np.array(tokens, dtype=np.int64),
        logprob_T=np.array(flat.logprobs if tokens else (), dtype=np.float32),
        spans=version_spans(completion.weight_versions or (), len(tokens)),
        aborted=completion.finish_reason == "abort",
    )


def version_spans(reported: Iterable[Any], num_tokens: int) -> VersionSpans:
    """Turn vLLM's spans into ours: its label of the first weights, "default", is version 0.

    Raises:
        BackendError: If they do not cover ``num_tokens`` tokens.
    """
    ends: dict[int, int] = {}
    for span in reported:
        if span.end > span.start:
            ends[0 if span.version == "default" else int(span.version)] = span.end
    spans = VersionSpans(tuple(ends), tuple(ends.values()))
    if spans.num_tokens != num_tokens:
        raise BackendError(f"version spans end at token {spans.num_tokens}, but {num_tokens} tokens were generated")
    return spans
