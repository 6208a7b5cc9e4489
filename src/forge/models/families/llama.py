"""Llama 3, 3.1, 3.2 (text) and 3.3, with or without the `llama3` scaling of rotary embeddings."""

from forge.models.families.family import Family

LLAMA = Family(
    name="llama",
    label="Llama 3.x",
    architecture="LlamaForCausalLM",
    fixed={"attention_bias": (False, None), "mlp_bias": (False, None)},
    tiny={
        "tie_embeddings": False,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 256,
        },
        "norm_eps": 1e-5,
    },
)
