"""Qwen2 and Qwen2.5: biases on queries, keys and values, and no norms of queries and keys."""

from forge.models.families.family import Family

QWEN2 = Family(
    name="qwen2",
    label="Qwen2 and Qwen2.5",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    window="upper",
    absent={"num_key_value_heads": 32},
    tiny={"rope_theta": 1_000_000.0},
)
