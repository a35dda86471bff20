"""The trainer's end of a transport in a test's own process, which an engine of vLLM receives from."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from backends.interface import Weights
from backends.vllm.engine import VLLMEngine


class Trainer:
    """The trainer's end of the broadcast transport; what it sends can differ from what it says."""

    async def meet(self, engine: VLLMEngine, model: Any) -> None:
        from backends.transfer.connection import RendezvousServer
        from backends.transfer.group import Sender
        from backends.transfer.row import parameters_of

        server = RendezvousServer.open("127.0.0.1")
        await engine.join_group(server.rendezvous, first_worker=1)
        names, parameters = ["trainer", "engine 2"], parameters_of(dict(model.named_parameters()))
        self.sender = Sender(server, names=names, parameters=parameters, timeout_s=600)
        await asyncio.to_thread(self.sender.meet)

    def weights(self, version: int, model: Any) -> Weights:
        from transfer_group import digest_of

        from backends.transfer.row import label

        checksum = digest_of(dict(model.named_parameters()))
        return Weights(version, f"broadcast:{label(version, checksum)}", {"all parameters": checksum})

    def sums(self, model: Any) -> list[int]:
        from transfer_group import sums_of

        return sums_of(dict(model.named_parameters()))

    async def send(self, version: int, model: Any, *, said_to_be: Any = None) -> int:
        """Send a model under the checksums of another; return how many machines refuse it."""
        from transfer_group import row_of

        row = row_of({name: parameter.detach() for name, parameter in model.named_parameters()})
        return await asyncio.to_thread(self.sender.send, row, version=version, sums=self.sums(said_to_be or model))


def wrong_in_one_bit(model: Any) -> Any:
    import torch

    wrong = copy.deepcopy(model)
    wrong.lm_head.weight.data.view(torch.uint8)[5, 3] ^= 1
    return wrong
