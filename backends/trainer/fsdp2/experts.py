"""Expert parallelism: the ranks of a group share the experts of each layer; tokens go to the ranks of their experts.

Theory of operation. A group is ``expert_parallel`` ranks that follow one another, of one machine where that divides its
GPUs: a token's way is short. Every rank sends each of its tokens to the experts that the router has chosen for it, the
experts compute, and the results come back the same way; in the backward pass gradients go these ways. Numbers of tokens
differ from rank to rank and are exchanged first. The experts compute as transformers does without parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup, all_to_all_single

from backends.trainer.sequence_parallel import exchange
from pipelinerl.config.run import RunConfig
from pipelinerl.errors import ConfigError

# Legend of shapes: N tokens of a row; K experts of a token; H width; P = N K pairs of a token and an expert; A pairs
# that arrive at a rank; G ranks of a group; E experts of a rank.


def experts_of(model: torch.nn.Module) -> list[Any]:
    """Return the modules that hold the fused experts of a layer and are called as transformers' experts are."""
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def check_experts(config: RunConfig, policy: Any) -> None:
    """Check that ranks and experts can be divided; else ``ConfigError``."""
    each, ranks = config.train_table.trainer.expert_parallel, config.trainer_ranks
    numbers = {experts.num_experts for experts in experts_of(policy)}
    if not numbers:
        raise ConfigError(
            "train.trainer.expert_parallel must be 1 for a model without experts that transformers fuses, "
            f"model_type={policy.config.model_type!r}, got {each}"
        )
    for what, number in (("ranks of the trainer", ranks), *(("experts of a layer", one) for one in sorted(numbers))):
        if number % each:
            raise ConfigError(f"train.trainer.expert_parallel must divide the {number} {what}, got {each}")


def share_experts(experts: Any, group: ProcessGroup) -> None:
    """Have a module with this rank's experts compute for the tokens of all ranks of the group."""
    experts.num_experts //= group.size()
    experts.forward = _SharedExperts(experts.forward, experts.num_experts, group)


@dataclass(frozen=True, slots=True)
class _SharedExperts:
    compute: Callable[..., torch.Tensor]
    """Results of this rank's experts."""
    num_experts: int
    """Of this rank."""
    group: ProcessGroup

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of the results of each token's experts, weighted."""
        num_tokens, num_chosen = top_k_index.shape
        expert_P = top_k_index.flatten()
        order_P = expert_P.argsort(stable=True)  # by expert, so by rank
        sent_GE = expert_P.new_zeros(self.group.size(), self.num_experts)
        sent_GE.view(-1).scatter_add_(0, expert_P, torch.ones_like(expert_P))
        arrived_GE = torch.empty_like(sent_GE)
        all_to_all_single(arrived_GE, sent_GE, group=self.group)
        sent, arrived = torch.stack([sent_GE, arrived_GE]).sum(2).tolist()  # the only wait for the device
        hidden_AH = exchange(hidden_states[order_P // num_chosen], self.group, sent, arrived)
        own_E = torch.arange(self.num_experts, device=expert_P.device)
        expert_A = own_E.repeat(self.group.size()).repeat_interleave(arrived_GE.flatten(), output_size=sum(arrived))
        if not sum(arrived):  # all parameters need a gradient, as on other ranks
            hidden_AH, expert_A = torch.nn.functional.pad(hidden_AH, (0, 0, 0, 1)), own_E[:1]
        result_AH = self.compute(hidden_AH, expert_A[:, None], top_k_weights.new_ones(len(expert_A), 1))
        result_PH = exchange(result_AH[: sum(arrived)], self.group, arrived, sent)[order_P.argsort()]
        weighted_PH = result_PH * top_k_weights.reshape(-1, 1)
        return weighted_PH.view(num_tokens, num_chosen, -1).sum(1).to(hidden_states.dtype)
