"""Typed configuration in layers: defaults, model preset, YAML files, command line.

    config = forge.config.load(ForgeConfig, files=["base.yaml"], overrides=["run.seed=7"])

A loaded configuration is checked as a whole, says where each value came from, and cannot be changed.
"""

from forge.config.adapter import AdapterConfig
from forge.config.agents import AgentConfig, AgentLimits, RunningBaselineConfig
from forge.config.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    PolicyLossConfig,
)
from forge.config.base import ConfigModel, FrozenDict, broken_rule
from forge.config.command_line import add_module_folders, from_command_line
from forge.config.critic import CriticConfig, CriticTrainingConfig
from forge.config.curriculum import CurriculumConfig
from forge.config.distill import DistillConfig, StoredDistillationConfig
from forge.config.distillation import DistillationConfig
from forge.config.endpoints import EndpointConfig
from forge.config.episodes import EpisodeConfig, EpisodeLimits
from forge.config.evals import EvalConfig, EvalSection
from forge.config.generator import (
    AutoscaleConfig,
    CanaryConfig,
    GenerationConfig,
    GeneratorConfig,
    GeneratorServiceConfig,
    PolicyConfig,
    PolicyGeneratorConfig,
    Sampling,
    ServeConfig,
    UpdateConfig,
    UpdateMode,
    Verify,
)
from forge.config.grpo import GRPOConfig, RecordConfig, ReferenceConfig, RolloutConfig
from forge.config.layers import Origin, preset_names, split_words
from forge.config.league import EloConfig, LeagueConfig
from forge.config.loading import Loaded, dump, explain, load, load_with_origins, save
from forge.config.preference import (
    PreferenceConfig,
    PreferenceDataConfig,
    PreferenceLossConfig,
    PreferenceReferenceConfig,
    PreferenceSourceConfig,
    PreferenceTrainingConfig,
    PreferenceValidationConfig,
)
from forge.config.problems import InvalidConfig, Problem
from forge.config.prompts import EvaluationConfig, PromptsConfig, PromptSourceConfig
from forge.config.recovery import RecoveryConfig
from forge.config.replay import ReplayRecordConfig
from forge.config.reward_training import (
    RewardDataConfig,
    RewardLossConfig,
    RewardSourceConfig,
    RewardTrainingConfig,
    RewardValidationConfig,
)
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
    SupervisedConfig,
    ValidationConfig,
)
from forge.config.teacher import TeacherConfig
from forge.config.training import CheckpointConfig, DistributedConfig, TrainerConfig, TrainingConfig

__all__ = [
    "AdapterConfig",
    "AdvantageConfig",
    "AgentConfig",
    "AgentLimits",
    "AlgorithmConfig",
    "AutoscaleConfig",
    "CanaryConfig",
    "CheckpointConfig",
    "ConfigModel",
    "CorrectionConfig",
    "CriticConfig",
    "CriticTrainingConfig",
    "CurriculumConfig",
    "DataConfig",
    "DistillConfig",
    "DistillationConfig",
    "DistributedConfig",
    "EloConfig",
    "EndpointConfig",
    "EpisodeConfig",
    "EpisodeLimits",
    "EvalConfig",
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
    "LeagueConfig",
    "Loaded",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "Origin",
    "OverlongConfig",
    "PolicyConfig",
    "PolicyGeneratorConfig",
    "PolicyLossConfig",
    "PreferenceConfig",
    "PreferenceDataConfig",
    "PreferenceLossConfig",
    "PreferenceReferenceConfig",
    "PreferenceSourceConfig",
    "PreferenceTrainingConfig",
    "PreferenceValidationConfig",
    "Problem",
    "PromptSourceConfig",
    "PromptsConfig",
    "RecordConfig",
    "RecoveryConfig",
    "ReferenceConfig",
    "ReplayRecordConfig",
    "ReplicatedWorkerConfig",
    "RewardConfig",
    "RewardDataConfig",
    "RewardLossConfig",
    "RewardModelConfig",
    "RewardSourceConfig",
    "RewardTrainingConfig",
    "RewardValidationConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RopeScalingConfig",
    "RunConfig",
    "RunningBaselineConfig",
    "SFTConfig",
    "Sampling",
    "ServeConfig",
    "SinkConfig",
    "SlurmConfig",
    "SourceConfig",
    "StoreConfig",
    "StoredDistillationConfig",
    "SupervisedConfig",
    "TeacherConfig",
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
