"""Replayed routers: no bit changes by their own routes; by the engine's, the trainer agrees with it."""

from __future__ import annotations

import copy
import dataclasses

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

from torch.overrides import TorchFunctionMode  # noqa: E402

from backends.trainer.deepspeed.rank import DeepSpeedRank  # noqa: E402
from backends.trainer.footprint import check_routers  # noqa: E402
from backends.trainer.fsdp2.rank import FSDP2Rank  # noqa: E402
from backends.trainer.model import recompute  # noqa: E402
from backends.trainer.replay import UNKNOWN, Replay, num_experts  # noqa: E402
from pipelinerl.errors import ConfigError  # noqa: E402

EXPERTS, TOP, LAYERS = 16, 3, 2
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 16, "num_experts_per_tok": TOP,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "n_shared_experts": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "head_dim": 8,
    },
}  # fmt: skip
TOKENS = torch.arange(200)[None] * 7 % 64


class Recorder(TorchFunctionMode):
    """Keeps the experts that routers choose, layer by layer."""

    def __init__(self):
        super().__init__()
        self.chosen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.topk and args[0].shape[-1] == EXPERTS:
            self.chosen.append(found.indices)
        return found


def model_of(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | CONFIGS[kind]))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def routes(model):
    with Recorder() as recorder, torch.no_grad():
        logits = model(TOKENS).logits
    return torch.stack(recorder.chosen, dim=1), logits


def logits_and_gradients(model, replay=None, routed_NLK=None):
    model = model.train()
    model.zero_grad()
    if replay is not None:
        replay.routed_NLK = routed_NLK
    logits = model(TOKENS).logits
    logits.square().sum().backward()
    return [logits.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_router_that_replays_itself_changes_no_bit_and_no_gradient(kind, recomputed):
    model = model_of(kind)
    assert num_experts(model.config) == EXPERTS
    routed_NLK, _ = routes(model)
    assert routed_NLK.shape == (200, LAYERS, TOP)
    recompute(model, recomputed)
    expected = logits_and_gradients(model)
    replay = Replay(model)
    for given in (routed_NLK, torch.full_like(routed_NLK, UNKNOWN), None):
        assert all(map(torch.equal, logits_and_gradients(model, replay, given), expected))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_experts_are_those_that_are_given_also_when_a_layer_is_recomputed(kind):
    """Every expert's number plus one, modulo all: the experts that get a gradient are the given ones, and no others."""
    model = model_of(kind)
    routed_NLK, _ = routes(model)
    given = (routed_NLK + 1) % EXPERTS
    given[1:] = given[0]  # all tokens go where the first goes
    recompute(model, True)
    logits_and_gradients(model, Replay(model), given)
    for layer in range(LAYERS):
        experts = next(
            one for name, one in model.named_parameters() if f"layers.{layer}." in name and "gate_up" in name
        )
        assert experts.grad.flatten(1).any(dim=1).nonzero()[:, 0].tolist() == sorted(given[0, layer].tolist())


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("qwen2", {}, "has no experts"),
        ("phimoe", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}, "has routers that do not choose by topk"),
    ],
)
def test_a_model_that_cannot_replay_is_refused(kind, settings, why):
    for one, given in CONFIGS.items():
        check_routers(transformers.AutoConfig.for_model(one, **(SHAPE | given)))
    config = transformers.AutoConfig.for_model(kind, **(SHAPE | settings))
    with pytest.raises(ConfigError, match=f"^train.trainer.router_replay must be false for a model that {why}"):
        check_routers(config)


def test_with_the_engines_experts_the_trainer_agrees_with_it_up_to_rounding():
    """The engine in bfloat16, the trainer in float32: where a router flips, log-probabilities differ by more."""
    trainer = model_of("qwen3_moe").eval()
    for layer in trainer.model.layers:  # routers of a random model hardly prefer any expert
        layer.mlp.gate.weight.data.normal_(std=0.02)
        layer.mlp.experts.down_proj.data.mul_(20)
    engine = copy.deepcopy(trainer).bfloat16()
    routed_NLK, sampled = routes(engine)
    mu = sampled.float().log_softmax(-1)[0]

    def divergence():
        with torch.no_grad():
            return float((mu.exp() * (mu - trainer(TOKENS).logits.log_softmax(-1)[0])).sum(-1).mean())

    own, _ = routes(trainer)
    flipped = (own.sort(-1).values != routed_NLK.sort(-1).values).any(-1).any(-1)
    assert 0 < flipped.float().mean() < 0.5
    without = divergence()
    Replay(trainer).routed_NLK = routed_NLK
    assert divergence() < without / 10


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "zero_stage"), [(DeepSpeedRank, 2), (DeepSpeedRank, 3), (FSDP2Rank, 3)])
def test_a_rank_trains_with_the_routes_of_its_samples(tmp_path, kind, zero_stage):
    """Its log-probabilities are those of the model that replays them, one sample after the other."""
    from tiny_trainer import plain_logprob, samples, started, train

    from pipelinerl.config.train import TrainerConfig

    model = model_of("qwen3_moe")
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    routed = [
        dataclasses.replace(one, routed_NLK=torch.stack([  # K different experts each
            torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(one.num_tokens * LAYERS)
        ]).view(-1, LAYERS, TOP).numpy().astype("int16"))
        for one in samples()
    ]  # fmt: skip
    trainer = TrainerConfig.model_validate({"router_replay": True, "zero_stage": zero_stage, "step_timeout_s": 1000})
    rank = started(tmp_path, zero_stage=zero_stage, kind=kind, trainer=trainer)
    logprob, _ = train(rank, routed)
    replay = Replay(model.eval())
    for one, logprob_T in zip(routed, logprob, strict=True):
        replay.routed_NLK = torch.tensor(one.routed_NLK, dtype=torch.int64)
        assert logprob_T == pytest.approx(plain_logprob(model, one).detach().numpy(), abs=1e-5)
