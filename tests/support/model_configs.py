"""The figures of the config.json of every model in the catalogue, and its published parameters."""


def qwen25(width, layers, heads, kv_heads, feed_forward, *, vocabulary=152064, tied=False):
    return {
        "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": feed_forward, "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def qwen3(width, layers, heads, kv_heads, feed_forward, *, tied=False, **more):
    config = qwen25(width, layers, heads, kv_heads, feed_forward, vocabulary=151936, tied=tied)
    return config | {"model_type": "qwen3", "head_dim": 128} | more


def qwen3_moe(width, layers, heads, feed_forward, expert_width):
    more = {"moe_intermediate_size": expert_width, "num_experts": 128, "num_experts_per_tok": 8}
    return qwen3(width, layers, heads, 4, feed_forward, **more) | {"model_type": "qwen3_moe"}


def llama(width, layers, heads, feed_forward):
    return qwen25(width, layers, heads, 8, feed_forward, vocabulary=128256) | {"model_type": "llama"}


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280,
    "tie_word_embeddings": False,
}  # fmt: skip
ARCHITECTURES = {
    "Qwen2.5-0.5B": (qwen25(896, 24, 14, 2, 4864, vocabulary=151936, tied=True), 0.494e9, 0.494e9),
    "Qwen2.5-1.5B": (qwen25(1536, 28, 12, 2, 8960, vocabulary=151936, tied=True), 1.54e9, 1.54e9),
    "Qwen2.5-3B": (qwen25(2048, 36, 16, 2, 11008, vocabulary=151936, tied=True), 3.09e9, 3.09e9),
    "Qwen2.5-7B": (qwen25(3584, 28, 28, 4, 18944), 7.61e9, 7.61e9),
    "Qwen2.5-14B": (qwen25(5120, 48, 40, 8, 13824), 14.7e9, 14.7e9),
    "Qwen2.5-32B": (qwen25(5120, 64, 40, 8, 27648), 32.5e9, 32.5e9),
    "Qwen2.5-72B": (qwen25(8192, 80, 64, 8, 29568), 72.7e9, 72.7e9),
    "Qwen3-0.6B": (qwen3(1024, 28, 16, 8, 3072, tied=True), 0.6e9, 0.6e9),
    "Qwen3-1.7B": (qwen3(2048, 28, 16, 8, 6144, tied=True), 1.72e9, 1.72e9),
    "Qwen3-4B": (qwen3(2560, 36, 32, 8, 9728, tied=True), 4.02e9, 4.02e9),
    "Qwen3-8B": (qwen3(4096, 36, 32, 8, 12288), 8.19e9, 8.19e9),
    "Qwen3-14B": (qwen3(5120, 40, 40, 8, 17408), 14.8e9, 14.8e9),
    "Qwen3-32B": (qwen3(5120, 64, 64, 8, 25600), 32.8e9, 32.8e9),
    "Qwen3-30B-A3B": (qwen3_moe(2048, 48, 32, 6144, 768), 30.5e9, 3.3e9),
    "Qwen3-235B-A22B": (qwen3_moe(4096, 94, 64, 12288, 1536), 235e9, 22e9),
    "Llama-3.1-8B": (llama(4096, 32, 32, 14336), 8.03e9, 8.03e9),
    "Llama-3.1-70B": (llama(8192, 80, 64, 28672), 70.6e9, 70.6e9),
    "Llama-3.2-1B": (llama(2048, 16, 32, 8192) | {"tie_word_embeddings": True}, 1.24e9, 1.24e9),
    "Llama-3.2-3B": (llama(3072, 28, 24, 8192) | {"tie_word_embeddings": True}, 3.21e9, 3.21e9),
    "DeepSeek-V3": (DEEPSEEK_V3, 671e9, 37e9),
}
"""The figures of each config.json, and the published parameters: all, and active."""


def delta_net(width, layers, heads, kv_heads, value_heads, *, model_type, **more):
    """Full attention in every fourth layer, gated delta nets in the others."""
    return {
        "model_type": model_type, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "vocab_size": 248320, "tie_word_embeddings": False, "attn_output_gate": True,
    } | more  # fmt: skip


def shared_and_routed(width, experts, per_token):
    return {
        "moe_intermediate_size": width, "shared_expert_intermediate_size": width, "num_experts": experts,
        "num_experts_per_tok": per_token,
    }  # fmt: skip


NEMOTRON = {
    "model_type": "nemotron_h", "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "mlp_hidden_act": "relu2",
    "n_shared_experts": 1, "vocab_size": 131072, "tie_word_embeddings": False,
}  # fmt: skip
NANO = NEMOTRON | {
    "hidden_size": 2688, "num_hidden_layers": 52, "mamba_num_heads": 64, "n_routed_experts": 128,
    "hybrid_override_pattern": "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME", "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
SUPER = NEMOTRON | {
    "hidden_size": 4096, "num_hidden_layers": 88, "mamba_num_heads": 128, "n_routed_experts": 512,
    "hybrid_override_pattern": 3 * "MEMEMEM*E" + 4 * "MEMEMEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
}  # fmt: skip
ULTRA = NEMOTRON | {
    "hidden_size": 8192, "num_attention_heads": 64, "mamba_num_heads": 256, "n_routed_experts": 512,
    "layers_block_type": 12 * ["attention"] + 48 * ["mamba", "moe"], "num_experts_per_tok": 22,
    "moe_intermediate_size": 5120, "moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10240,
}  # fmt: skip
QWEN35_35B = delta_net(2048, 40, 16, 2, 32, model_type="qwen3_5_moe_text") | shared_and_routed(512, 256, 8)
QWEN35_27B = delta_net(5120, 64, 24, 4, 48, model_type="qwen3_5_text", intermediate_size=17408)
QWEN35_9B = delta_net(4096, 32, 16, 4, 32, model_type="qwen3_5_text", intermediate_size=12288)
QWEN35_397B = delta_net(4096, 60, 32, 2, 64, model_type="qwen3_5_moe_text") | shared_and_routed(1024, 512, 10)
QWEN3_NEXT = delta_net(2048, 48, 16, 2, 32, model_type="qwen3_next", vocab_size=151936) | shared_and_routed(
    512, 512, 10
)
del QWEN3_NEXT["attn_output_gate"]  # it has the gate, and no such key


def glm45(width, layers, dense, feed_forward, experts, expert_width, *, normed):
    return {
        "model_type": "glm4_moe", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "use_qk_norm": normed,
        "intermediate_size": feed_forward, "moe_intermediate_size": expert_width, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": dense, "vocab_size": 151552,
        "tie_word_embeddings": False,
    }  # fmt: skip


def gpt_oss(layers, experts):
    return {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "intermediate_size": 2880,
        "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088,
        "layer_types": layers // 2 * ["sliding_attention", "full_attention"], "tie_word_embeddings": False,
    }  # fmt: skip


def mixtral(width, layers, heads, feed_forward):
    more = {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    return llama(width, layers, heads, feed_forward) | more


KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "vocab_size": 163840,
}  # fmt: skip
GLM47_FLASH = {
    "model_type": "glm4_moe_lite", "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20,
    "num_key_value_heads": 20, "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "kv_lora_rank": 512,
    "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256, "vocab_size": 154880,
    "tie_word_embeddings": False,
}  # fmt: skip
COUNTED = {
    "Nemotron-3-Nano-30B-A3B": (NANO, 31_577_940_288, 31.6e9, 3.2e9, 1),
    "Nemotron-3-Super-120B-A12B": (SUPER, 120_668_707_840, 120e9, 12e9, 1),
    "Nemotron-3-Ultra-550B-A55B": (ULTRA, 549_308_993_536, 550e9, 55e9, 1),
    "Qwen3.5-35B-A3B": (QWEN35_35B, 34_660_610_688, 35e9, 3e9, 1),
    "Qwen3.5-9B": (QWEN35_9B, 8_953_803_264, 9e9, 9e9, 0),
    "Qwen3.5-27B": (QWEN35_27B, 26_895_998_464, 27e9, 27e9, 0),
    "Qwen3.5-397B-A17B": (QWEN35_397B, 396_346_350_336, 397e9, 17e9, 0),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296, 80e9, 3e9, 2),
    "GLM-4.5": (glm45(5120, 92, 3, 12288, 160, 1536, normed=True), 352_797_829_024, 355e9, 32e9, 2),
    "GLM-4.5-Air": (glm45(4096, 46, 1, 10944, 128, 1408, normed=False), 106_852_251_264, 106e9, 12e9, 2),
    "GLM-4.7-Flash": (GLM47_FLASH, 29_943_393_920, 30e9, 3e9, 2),
    "Kimi-K2": (KIMI_K2, 1_026_408_232_448, 1.04e12, 32.6e9, 0),
    "gpt-oss-20b": (gpt_oss(24, 32), 20_914_757_184, 20.9e9, 3.6e9, 1),
    "gpt-oss-120b": (gpt_oss(36, 128), 116_829_156_672, 116.8e9, 5.1e9, 1),
    "Mixtral-8x7B": (mixtral(4096, 32, 32, 14336), 46_702_792_704, 46.7e9, 12.9e9, 0),
    "Mixtral-8x22B": (mixtral(6144, 56, 48, 16384), 140_620_634_112, 141e9, 39e9, 0),
}
"""The figures of each config.json; the parameters of the model that transformers 5.19 makes of it (without weights,
with the biases that balance the experts); those published, all and active; how many of the two embeddings the latter
leaves out.
"""
