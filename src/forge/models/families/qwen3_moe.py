"""Qwen3 with a mixture of experts in every layer."""

from forge.models.families.family import Family

QWEN3_MOE = Family(
    name="qwen3_moe",
    label="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    has_experts=True,
    window="all",
    fixed={
        "attention_bias": (False, None),
        "decoder_sparse_step": (1, None),
        "mlp_only_layers": ([], None),
        "norm_topk_prob": (True,),
    },
    absent={"num_key_value_heads": 4},
    tiny={
        "tie_embeddings": False,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "expert_intermediate_size": 64,
    },
)
