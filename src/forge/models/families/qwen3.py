"""Qwen3, dense."""

from forge.models.families.family import Family

QWEN3 = Family(
    name="qwen3",
    label="Qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    window="upper",
    fixed={"attention_bias": (False, None)},
    absent={"num_key_value_heads": 32, "head_dim": 128},
)
