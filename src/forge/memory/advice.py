"""What `forge plan` notes about a run beyond its memory."""

from __future__ import annotations

from typing import Final

from forge.config import GRPOConfig

ACCUMULATION_NOTE: Final = (
    "training.batch_size and training.gradient_accumulation_steps do not change the memory of a run: "
    "training.microbatch_tokens does, and after it training.max_seq_len and training.activation_checkpointing"
)
"""For whoever expects a smaller batch and more accumulation to take less memory, as in other libraries."""


def placement_notes(config: GRPOConfig, *, num_ranks: int, on_gpu: bool) -> list[str]:
    """Return advice for runs whose trainer and generator share one GPU and do not simply take turns."""
    generator = config.generator
    is_one = num_ranks == 1 and generator.num_replicas == 1 and generator.tensor_parallel == 1
    if not (on_gpu and is_one and generator.capabilities.shared_weights):
        return []
    wanted = {"placement=shared": config.placement != "shared", "rollout.staleness=0": config.rollout.staleness > 0}
    if config.placement not in ("beside", "shared") or not any(wanted.values()):
        return []
    words = " ".join(word for word, is_changed in wanted.items() if is_changed)
    return [f"on one GPU, generating while training has gained nothing so far, and takes memory: try {words}"]
