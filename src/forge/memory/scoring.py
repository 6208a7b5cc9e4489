"""The memory of models that only score: the reference model's, and that of the model behind `reward_model`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge.config import DistributedConfig, ModelConfig, RewardsConfig, TrainingConfig
from forge.errors import ModelError
from forge.memory.constants import HOST_GPU_PROCESS, HOST_PROCESS
from forge.memory.records import Moment, Part, holdings
from forge.memory.trainer import TrainerJob, scoring_moment
from forge.models.architecture import complete, merge
from forge.models.hf_config import read_hf_config
from forge.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Scoring:
    """A model that only scores.

    Attributes:
        name: what the worker is called.
        sizes: the widths of its model.
        num_replicas, on_gpu: its processes.
        training, distributed: what decides its rows and its precision.
    """

    name: str
    sizes: Sizes
    num_replicas: int
    on_gpu: bool
    training: TrainingConfig
    distributed: DistributedConfig

    def moment(self) -> Moment:
        """Return what one replica holds while it scores."""
        from forge.trainer.layout import Layout

        alone = Layout()
        ((_, whole),) = holdings(self.sizes, alone)
        return scoring_moment(TrainerJob(self.sizes, whole, alone, self.training, self.distributed, on_gpu=self.on_gpu))

    def host_part(self) -> Part:
        """Return what all replicas hold of a host's memory."""
        count = self.num_replicas
        if self.on_gpu:
            return Part(f"{self.name}'s processes", count * HOST_GPU_PROCESS, f"{count}")
        return Part(self.name, count * (HOST_PROCESS + self.moment().num_bytes), f"{count} replica(s)")


def read_reward_model(section: RewardsConfig, policy: ModelConfig, notes: list[str]) -> Scoring | None:
    """Return the model behind the reward `reward_model`; None where there is none, or where its size is not known.

    One that is not on this machine yet is planned with the architecture of the policy.
    """
    config = section.reward_model
    if config is None or not any(function.kind == "reward_model" for function in section.functions):
        return None
    try:
        if (Path(config.path) / "config.json").is_file():
            facts = complete(merge(ModelConfig(path=config.path, head="scalar"), read_hf_config(config.path)))
        else:
            notes.append(f"{config.path} is not here: the reward model is planned with the policy's architecture")
            facts = policy.model_copy(update={"head": "scalar"})
    except ModelError:
        notes.append("the reward model is not of a family whose memory is known: it is not planned")
        return None
    longest, at_once = config.limits(facts.max_seq_len)
    is_half = config.chosen_precision == "bfloat16"
    return Scoring(
        name="reward model",
        sizes=Sizes.of(facts),
        num_replicas=config.num_replicas,
        on_gpu=config.with_gpus,
        training=TrainingConfig(max_seq_len=longest, microbatch_tokens=at_once),
        distributed=DistributedConfig(precision="bfloat16_pure" if is_half else "float32"),
    )
