"""Typed configuration in layers: defaults, model preset, YAML files, command line.

    config = forge.config.load(ForgeConfig, files=["base.yaml"], overrides=["run.seed=7"])

A loaded configuration is checked as a whole, says where each value came from, and cannot be changed.
"""

from forge.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    PolicyLossConfig,
)
from forge.config.base import ConfigModel, FrozenDict, broken_rule
from forge.config.command_line import add_module_folders, from_command_line
from forge.config.episodes import EpisodeConfig, EpisodeLimits
from forge.config.evals import EvalConfig, EvalEndpointConfig, EvalSection
from forge.config.generator import (
    CanaryConfig,
    GenerationConfig,
    GeneratorConfig,
    GeneratorServiceConfig,
    PolicyConfig,
    Sampling,
    ServeConfig,
    UpdateConfig,
    UpdateMode,
    Verify,
)
from forge.config.grpo import (
    EvaluationConfig,
    GRPOConfig,
    PromptsConfig,
    PromptSourceConfig,
    RecordConfig,
    ReferenceConfig,
    RolloutConfig,
)
from forge.config.layers import Origin, preset_names, split_words
from forge.config.loading import Loaded, dump, explain, load, load_with_origins, save
from forge.config.problems import InvalidConfig, Problem
from forge.config.rewards import (
    JudgeConfig,
    OverlongConfig,
    RewardConfig,
    RewardModelConfig,
    RewardsConfig,
)
from forge.config.schema import (
    ForgeConfig,
    KubernetesConfig,
    LauncherConfig,
    ModelConfig,
    ReplicatedWorkerConfig,
    RopeScalingConfig,
    RunConfig,
    SlurmConfig,
    StoreConfig,
    WorkerConfig,
)
from forge.config.sft import (
    DataConfig,
    LossConfig,
    MetricsConfig,
    SFTConfig,
    SinkConfig,
    SourceConfig,
    ValidationConfig,
)
from forge.config.training import CheckpointConfig, DistributedConfig, TrainerConfig, TrainingConfig

__all__ = [
    "AdvantageConfig",
    "AlgorithmConfig",
    "CanaryConfig",
    "CheckpointConfig",
    "ConfigModel",
    "CorrectionConfig",
    "DataConfig",
    "DistributedConfig",
    "EpisodeConfig",
    "EpisodeLimits",
    "EvalConfig",
    "EvalEndpointConfig",
    "EvalSection",
    "EvaluationConfig",
    "ForgeConfig",
    "FrozenDict",
    "GRPOConfig",
    "GenerationConfig",
    "GeneratorConfig",
    "GeneratorServiceConfig",
    "InvalidConfig",
    "JudgeConfig",
    "KLConfig",
    "KubernetesConfig",
    "LauncherConfig",
    "Loaded",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "Origin",
    "OverlongConfig",
    "PolicyConfig",
    "PolicyLossConfig",
    "Problem",
    "PromptSourceConfig",
    "PromptsConfig",
    "RecordConfig",
    "ReferenceConfig",
    "ReplicatedWorkerConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RopeScalingConfig",
    "RunConfig",
    "SFTConfig",
    "Sampling",
    "ServeConfig",
    "SinkConfig",
    "SlurmConfig",
    "SourceConfig",
    "StoreConfig",
    "TrainerConfig",
    "TrainingConfig",
    "UpdateConfig",
    "UpdateMode",
    "ValidationConfig",
    "Verify",
    "WorkerConfig",
    "add_module_folders",
    "broken_rule",
    "dump",
    "explain",
    "from_command_line",
    "load",
    "load_with_origins",
    "preset_names",
    "save",
    "split_words",
]
