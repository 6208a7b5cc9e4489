"""Who is on which GPU, and what counts at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from forge.config import GRPOConfig, ModelConfig, PolicyConfig, SFTConfig, load
from forge.errors import ConfigError, LayoutError, ModelError
from forge.memory import Card, MemoryPlan, plan_memory, resolve_run
from forge.memory.constants import GIB
from forge.models.architecture import complete
from forge.models.sizes import Sizes

CARD = Card(80 * GIB)
BASE = (
    "model.preset=qwen3_1_7b",
    "distributed.shard=1",
    "distributed.precision=bfloat16",
    "training.max_seq_len=1536",
    "generator.kv_cache_gb=8",
)


def planned(*words: str, card: Card | None = CARD, schema: Any = GRPOConfig) -> MemoryPlan:
    config = load(schema, overrides=[*(BASE if schema is GRPOConfig else ()), *words])
    return plan_memory(resolve_run(config, card=card), card=card)


def sizes(plan: MemoryPlan, *, device: int = 0, phase: str = "training") -> dict[str, int]:
    """The parts of a device's fullest moment of a phase, by owner and name."""
    moment = plan.gpus[device].phase_peaks()[phase]  # type: ignore[index]
    return {f"{part.owner}/{part.name}": part.num_bytes for part in moment.parts}


def test_apart_everyone_has_a_gpu() -> None:
    plan = planned("placement=apart", "algorithm.kl.coefficient=0.01", "generator.num_replicas=2")
    assert [(device.name, device.count) for device in plan.gpus] == [("trainer", 1), ("generator", 2), ("reference", 1)]
    assert plan.num_gpus == 4


def test_weights_states_and_gradients_are_what_adamw_needs() -> None:
    parts = sizes(planned("placement=apart"))
    count = planned().num_parameters
    assert parts["/weights"] == parts["/gradients"] == 4 * count
    assert parts["/optimizer states"] == 8 * count
    assert parts["/published weights"] == 2 * 2 * count  # two versions, in what generators compute in
    assert parts["/gathered weights"] == pytest.approx(2 * count, rel=0.001)  # computed with in bfloat16


def test_float16_takes_the_memory_of_bfloat16() -> None:
    assert sizes(planned("placement=apart", "distributed.precision=float16")) == sizes(planned("placement=apart"))


def test_muon_has_one_state_for_hidden_matrices() -> None:
    parts = sizes(planned("placement=apart", "training.optimizer=muon"))
    model = Sizes.of(complete(ModelConfig(preset="qwen3_1_7b")))
    hidden = model.num_layers * model.layer_matrices
    assert parts["/optimizer states"] == 4 * hidden + 8 * (model.total - hidden)
    own = sizes(planned("placement=apart", "training.optimizer=torch.optim:Adagrad"))
    assert own["/optimizer states"] == 8 * model.total, "two are assumed of one that is not known"


def test_weights_are_published_wide_for_generators_that_compute_so() -> None:
    half, wide = (sizes(planned("placement=apart", *more)) for more in ((), ("generator.precision=float32",)))
    assert wide["/published weights"] == 2 * half["/published weights"]


def test_an_engine_of_another_precision_has_a_copy_of_the_weights() -> None:
    parts = sizes(planned("placement=shared"))
    assert parts["generator/weights"] == 2 * planned().num_parameters
    assert "generator/CUDA context" not in parts


@pytest.mark.parametrize("placement", ["turns", "beside", "shared"])
def test_one_gpu_holds_both(placement: str) -> None:
    precision = "distributed.precision=bfloat16_pure" if placement == "shared" else "distributed.precision=bfloat16"
    plan = planned(f"placement={placement}", precision)
    assert [device.name for device in plan.gpus] == ["trainer + generator"]
    assert plan.num_gpus == 1
    assert "generator/KV cache" in sizes(plan, phase="generating")


@pytest.mark.parametrize("placement", ["turns", "beside"])
def test_a_generator_on_the_cpu_is_counted_once_and_on_the_host(placement: str) -> None:
    plan = planned(f"placement={placement}", "generator.with_gpus=false")
    assert [device.name for device in plan.gpus] == ["trainer"]
    assert not any(name.startswith("generator/") for name in sizes(plan))
    assert any("generator" in str(part) for part in plan.host.peak.parts)


def test_a_sleeping_generator_leaves_the_gpu_to_the_trainer() -> None:
    turns, beside = planned("placement=turns"), planned("placement=beside")
    assert "generator/KV cache" not in sizes(turns)
    assert sizes(beside)["generator/KV cache"] == pytest.approx(8 * GIB, rel=0.01)
    assert turns.gpus[0].peak.num_bytes < beside.gpus[0].peak.num_bytes - 7 * GIB
    assert any(part.name == "weights asleep" for part in turns.host.peak.parts)


def test_a_shared_policy_has_one_copy_of_the_weights_and_publishes_none() -> None:
    parts = sizes(planned("placement=shared", "distributed.precision=bfloat16_pure"))
    assert "generator/weights" not in parts
    assert "trainer/published weights" not in parts
    assert "generator/CUDA context" not in parts
    assert "generator/KV cache" not in parts  # it is given back while the trainer works


def test_shards_divide_what_is_kept_and_not_what_is_gathered() -> None:
    one, four = planned("placement=apart"), planned("placement=apart", "distributed.shard=4")
    assert four.num_gpus == 5
    assert sizes(four)["/optimizer states"] == pytest.approx(sizes(one)["/optimizer states"] / 4, rel=0.001)
    assert sizes(four)["/gathered weights"] > sizes(one)["/gathered weights"] / 4


def test_over_several_hosts_versions_lie_in_host_memory() -> None:
    words = ("placement=apart", "distributed.shard=2", "distributed.hosts=2", "launcher.kind=slurm")
    plan, local = planned(*words), planned("placement=apart", "distributed.shard=2")
    assert sizes(plan)["/published weights"] * 2 == sizes(local)["/published weights"]  # staging on the way
    assert any(part.name == "published weights" for part in plan.host.peak.parts)
    assert not any(part.name == "published weights" for part in local.host.peak.parts)


@pytest.mark.parametrize(
    ("words", "num_copies"),
    [
        ("launcher.slurm.nodes=4 generator.num_replicas=8", 3),
        ("launcher.slurm.nodes=4 generator.num_replicas=2", 2),
        ("launcher.slurm.nodes=1 generator.num_replicas=2", 0),
        ("launcher.slurm.nodes=4 generator.num_replicas=8 store.distribution=direct", 0),
    ],
)
def test_each_other_host_with_generators_has_a_copy_of_the_weights(words: str, num_copies: int) -> None:
    plan = planned("placement=apart", "launcher.kind=slurm", *words.split())
    parts = {part.name: part.num_bytes for part in plan.host.peak.parts}
    assert parts.get("received weights", 0) == parts["published weights"] / 2 * num_copies


@pytest.mark.parametrize(
    ("words", "smaller"),
    [
        ("training.activation_checkpointing=selective", True),
        ("training.activation_checkpointing=full", True),
        ("training.optimizer_dtype=bfloat16", True),
        ("training.activation_offload=true", True),
        ("distributed.precision=bfloat16_pure", True),
        ("training.microbatch_tokens=16384", False),
        ("model.head_precision=float32", False),
        ("training.head_cache_gb=0", True),
        ("training.head_cache_gb=0 training.head_chunk_tokens=128", True),
        ("distributed.precision=float32", False),
        ("algorithm.loss.entropy_coefficient=0.01", False),
    ],
)
def test_each_setting_moves_the_peak_its_way(words: str, smaller: bool) -> None:
    base = ("placement=apart", "training.microbatch_tokens=8192")
    before, after = (planned(*base, *more).gpus[0].peak.num_bytes for more in ((), words.split()))
    assert (after < before) is smaller
    assert after != before


def test_offloaded_activations_are_in_the_host() -> None:
    plan = planned("placement=apart", "training.activation_offload=true")
    assert any(part.name == "offloaded activations" for part in plan.host.peak.parts)


def test_sharing_prompts_shows_in_attention() -> None:
    words = ("placement=apart", "training.microbatch_tokens=8192", "generator.sampling.max_tokens=512")
    shared, plain = (
        planned(*words, f"rollout.share_prompts={each}").gpus[0].peak.num_bytes for each in ("true", "false")
    )
    assert shared > plain  # a row of 8192 tokens holds more samples, and each is attended to whole


def test_fine_tuning_publishes_nothing() -> None:
    plan = planned("model.preset=qwen3_0_6b", "distributed.shard=1", schema=SFTConfig)
    assert [device.name for device in plan.gpus] == ["trainer"]
    assert "/published weights" not in sizes(plan)


def test_a_pipeline_has_ends_that_differ() -> None:
    words = ("model.preset=qwen3_8b", "distributed.shard=1", "distributed.pipeline=2", "distributed.precision=bfloat16")
    plan = planned(*words, schema=SFTConfig)
    assert [device.name for device in plan.gpus] == ["trainer (first stage)", "trainer (last stage)"]
    assert plan.num_gpus == 2


def test_all_gpus_that_are_left_share_a_copy() -> None:
    plan = planned("model.preset=qwen3_0_6b", card=Card(80 * GIB, 4), schema=SFTConfig)
    assert plan.num_gpus == 4


def test_generators_alone() -> None:
    words = ("model.preset=qwen3_0_6b", "generator.num_replicas=2", "generator.gpu_memory_share=0.4")
    plan = planned(*words, "generator.engine=vllm", schema=PolicyConfig)
    assert [(device.name, device.count) for device in plan.gpus] == [("generator", 2)]
    assert plan.gpus[0].peak.num_bytes == pytest.approx(0.4 * CARD.usable, rel=0.05)
    native = planned(*words, schema=PolicyConfig)
    assert {part.name for part in native.gpus[0].peak.parts} >= {"weights", "KV cache", "CUDA graphs", "sampler"}


def test_without_gpus_everything_is_in_the_host() -> None:
    plan = planned(card=None)
    assert plan.gpus == ()
    assert plan.card is None
    names = {part.name for part in plan.host.peak.parts}
    assert names >= {"weights", "optimizer states", "KV cache", "published weights"}
    assert plan.host.capacity is not None


def test_a_model_that_nothing_describes_is_refused() -> None:
    config = load(SFTConfig, overrides=["model.path=nowhere/at-all"])
    with pytest.raises(ModelError) as refused:
        resolve_run(config, card=CARD)
    assert refused.value.path == "model.path"
    assert refused.value.value == "nowhere/at-all"
    assert "model.preset" in str(refused.value.repair)


def test_a_folder_that_is_not_here_is_planned_from_its_preset() -> None:
    config = load(SFTConfig, overrides=["model.path=nowhere/at-all", "model.preset=qwen3_0_6b"])
    assert any("nowhere/at-all" in note for note in resolve_run(config, card=CARD).notes)


def test_a_layout_that_cannot_be_is_refused_as_elsewhere() -> None:
    with pytest.raises(LayoutError):
        planned("distributed.tensor=3")


def test_a_configuration_of_another_kind_is_refused() -> None:
    from forge.config import ForgeConfig

    with pytest.raises(ConfigError) as refused:
        resolve_run(load(ForgeConfig, overrides=["model.preset=tiny"]))
    assert refused.value.path == "--kind"


def test_an_adapter_alone_has_gradients_states_and_versions() -> None:
    adapter = ("adapter.rank=16", "model.path=nowhere")
    parts = sizes(planned("placement=apart", *adapter))
    count, trained = planned().num_parameters, 17_432_576  # 28 layers: 16 x (in + out) of seven layers each
    assert parts["/weights"] == 2 * count + 4 * trained  # frozen in bfloat16, and the adapter in float32
    assert parts["/gradients"] == 4 * trained
    assert parts["/optimizer states"] == 8 * trained
    assert parts["/published weights"] == 2 * 2 * trained
    assert "/gathered weights" not in parts


def test_a_generator_in_one_process_shares_the_weights_below_an_adapter() -> None:
    parts = sizes(planned("placement=shared", "adapter.rank=16"), phase="generating")
    assert "generator/weights" not in parts


@pytest.mark.parametrize(
    ("targets", "given", "num_weights"),
    [
        ("[o_proj]", "{}", 16 * 4096),
        ("[q_proj]", "{}", 16 * (4096 + 3072 + 3072)),  # keys and values are one layer with queries
        ("[o_proj]", "{max_lora_rank: 64}", 64 * 4096),
        ("all", "{enable_lora: true}", 2 * 16 * (4096 + 4096 + 3072 + 3072 + 3 * 8192)),
    ],
)
def test_vllm_has_slots_for_adapters(targets: str, given: str, num_weights: int) -> None:
    """Of the smallest rank that it supports, which is 16 for one of 9."""
    words = ("placement=apart", "generator.engine=vllm", "model.path=nowhere")
    adapted = planned(*words, "adapter.rank=9", f"adapter.targets={targets}", f"generator.engine_args={given}")
    parts = {part.name: part.num_bytes for part in adapted.gpus[1].peak.parts}
    assert parts["adapter slots"] == 2 * 28 * num_weights
    assert adapted.gpus[1].peak.num_bytes - planned(*words).gpus[1].peak.num_bytes == parts["adapter slots"]


def test_an_adapter_is_its_own_reference() -> None:
    held = ("algorithm.kl.coefficient=0.01", "model.path=nowhere")
    assert [device.name for device in planned(*held, "adapter.rank=16").gpus] == ["trainer", "generator"]
    assert [device.name for device in planned(*held).gpus] == ["trainer", "generator", "reference"]


def test_a_critic_is_on_the_trainers_gpu_or_on_its_own() -> None:
    """Beside the trainer each of both rests while the other computes, and the generator's moment has both at rest."""
    without = planned("placement=turns", "rollout.group_size=1", "algorithm.preset=reinforce")
    beside = planned("placement=turns", "rollout.group_size=1", "algorithm.preset=ppo")
    (alone,), (both,) = without.gpus, beside.gpus
    assert (both.name, beside.num_gpus) == ("trainer + critic + generator", 1)
    for moment in both.moments:
        owners = {part.owner for part in moment.parts if part.name in ("weights", "optimizer states")}
        assert {"trainer", "critic"} <= owners
    of_critic = [moment for moment in both.moments if moment.name.startswith("critic: ")]
    assert of_critic
    resting = sum(p.num_bytes for p in of_critic[0].parts if p.owner == "critic" and p.name.startswith("optimizer"))
    assert both.peak.num_bytes > alone.peak.num_bytes + resting
    apart = planned("placement=turns", "rollout.group_size=1", "algorithm.preset=ppo", "critic.placement=apart")
    assert [device.name for device in apart.gpus] == ["trainer + generator", "critic"]
    (critic,) = (device for device in apart.gpus if device.name == "critic")
    assert not any(part.name == "published weights" for moment in critic.moments for part in moment.parts)
    host = {part.owner for part in beside.host.peak.parts}
    assert "critic" in host


def test_a_critic_has_keys_of_its_own() -> None:
    base = ("placement=apart", "rollout.group_size=1", "algorithm.preset=ppo", "critic.placement=apart")
    plain, narrow = planned(*base), planned(*base, "critic.training.optimizer_dtype=bfloat16")
    sizes = [{each.name: each.peak.num_bytes for each in plan.gpus} for plan in (plain, narrow)]
    assert sizes[0]["trainer"] == sizes[1]["trainer"]
    assert sizes[0]["critic"] > sizes[1]["critic"]
