"""Who is on which GPU, and what is alive there at the same time."""

from __future__ import annotations

from dataclasses import replace

from forge.memory.card import Card, host_memory
from forge.memory.constants import HOST_GPU_PROCESS, HOST_PROCESS
from forge.memory.generator import GeneratorJob, asleep_host_bytes, asleep_parts, awake_parts
from forge.memory.records import (
    ITEM_BYTES,
    MASTER_BYTES,
    DevicePlan,
    Holding,
    MemoryPlan,
    Moment,
    Part,
    holdings,
    owned,
)
from forge.memory.resolved import ResolvedRun
from forge.memory.scoring import Scoring
from forge.memory.trainer import (
    TrainerJob,
    lasting_parts,
    make_moment,
    offloaded_bytes,
    training_moments,
)
from forge.models.sizes import Sizes

_NO_LIMIT = 1 << 62


def plan_memory(run: ResolvedRun, *, card: Card | None = None, host_bytes: int | None = None) -> MemoryPlan:
    """The memory of a run on GPUs like `card`, or on CPUs.

    `host_bytes` is the memory of a host; None for what this one has where the run is on CPUs, and for no limit where it
    is on GPUs, which may be elsewhere.
    """
    gpus = _trainer_gpus(run, card) + _critic_gpus(run, card) + _generator_gpus(run, card) + _scoring_gpus(run, card)
    gpus += _teacher_gpus(run, card)
    if host_bytes is None and not run.uses_gpus:
        host_bytes = host_memory()
    return MemoryPlan(
        model=run.name,
        num_parameters=run.sizes.total,
        card=card if run.uses_gpus else None,
        gpus=gpus,
        host=_host(run, card, host_bytes),
        num_gpus=sum(device.count for device in gpus),
        notes=run.notes,
    )


def trainer_jobs(run: ResolvedRun) -> tuple[tuple[str, TrainerJob], ...]:
    """What each kind of rank of the trainer is asked to do."""
    if run.training is None or run.distributed is None or run.layout is None:
        return ()
    return tuple((name, _trainer_job(run, holding)) for name, holding in _holdings(run))


def _holdings(run: ResolvedRun) -> tuple[tuple[str, Holding], ...]:
    assert run.layout is not None
    return holdings(run.sizes, run.layout, adapter=run.adapter_parameters, quantized=run.quantized)


def _trainer_job(run: ResolvedRun, holding: Holding) -> TrainerJob:
    assert run.training is not None and run.distributed is not None and run.layout is not None  # noqa: PT018
    versions = run.num_versions if run.trainer_on_gpu else 0
    job = TrainerJob(
        sizes=run.sizes,
        holding=holding,
        layout=run.layout,
        training=run.training,
        distributed=run.distributed,
        on_gpu=run.trainer_on_gpu,
        attended_ratio=run.attended_ratio,
        wide_logits=run.facts.head_precision == "float32",
        entropy=run.entropy,
        caches_logits=run.reads_logprobs,
        num_versions=min(1, versions) if run.is_spread else versions,  # staging on the way to the host
    )
    return replace(job, published_item=run.published_item, quantized=run.quantized)


def critic_jobs(run: ResolvedRun) -> tuple[tuple[str, TrainerJob], ...]:
    """What each kind of rank of the critic is asked to do; nothing without one."""
    critic = run.critic
    if critic is None:
        return ()
    return tuple(
        (
            name,
            TrainerJob(
                sizes=critic.sizes,
                holding=holding,
                layout=critic.layout,
                training=critic.training,
                distributed=critic.distributed,
                on_gpu=critic.on_gpu,
                attended_ratio=run.attended_ratio,
            ),
        )
        for name, holding in holdings(critic.sizes, critic.layout)
    )


def _critic_beside(run: ResolvedRun) -> TrainerJob | None:
    """What the largest rank of a critic does that shares the trainer's GPUs; None without one."""
    if run.critic is None or not (run.critic.on_gpu and run.critic.is_beside):
        return None
    return max((job for _, job in critic_jobs(run)), key=lambda job: job.holding.held)


def generator_job(run: ResolvedRun, card: Card | None, *, occupied: int = 0) -> GeneratorJob | None:
    """What each generator is asked to do; None for a run without."""
    if run.generator is None:
        return None
    on_gpu = run.generator_on_gpu
    return GeneratorJob(
        facts=run.facts,
        sizes=run.sizes,
        config=run.generator,
        max_seq_len=run.generator_seq_len,
        on_gpu=on_gpu,
        capacity=_capacity(on_gpu, card),
        tensor=run.tensor_parallel,
        share=run.share,
        occupied=occupied,
        is_guest=run.placement == "shared",
        takes_turns=run.takes_turns,
        num_alike=run.num_generators if run.placement != "apart" else 1,
        kept_item=_kept_item(run),
        num_resident=run.num_resident,
        published_weights=run.published_weights,
        published_item=run.published_item,
        adapter=run.adapter,
        quantized=run.quantized,
    )


def _kept_item(run: ResolvedRun) -> int | None:
    """Return in how many bytes a trainer keeps each weight that is not an adapter's."""
    if run.distributed is None:
        return None
    is_narrow = run.adapter_parameters is not None and run.distributed.precision in ("bfloat16", "float16")
    return ITEM_BYTES["bfloat16"] if is_narrow else MASTER_BYTES[run.distributed.precision]


def _capacity(on_gpu: bool, card: Card | None) -> int:
    return (card.usable if card is not None else _NO_LIMIT) if on_gpu else (host_memory() or _NO_LIMIT)


def _device(name: str, count: int, card: Card | None, moments: tuple[Moment, ...]) -> DevicePlan:
    return DevicePlan(name, count, card.usable if card is not None else None, moments)


def _trainer_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    if not run.trainer_on_gpu or run.layout is None:
        return ()
    kinds = trainer_jobs(run)
    devices: list[DevicePlan] = []
    has_guests = run.placement != "apart" and run.generator_on_gpu
    critic = "" if _critic_beside(run) is None else " + critic"
    for index, (kind, job) in enumerate(kinds):
        count = run.layout.num_ranks // len(kinds)
        if has_guests and index == 0:  # generators are on the first of the trainer's GPUs
            hosting = min(run.tensor_parallel, count)
            devices.append(_device(f"trainer{kind}{critic} + generator", hosting, card, _together(run, job, card)))
            count -= hosting
        if count:
            devices.append(_device(f"trainer{kind}{critic}", count, card, _alone(run, job)))
    return tuple(devices)


def _alone(run: ResolvedRun, job: TrainerJob) -> tuple[Moment, ...]:
    beside = _critic_beside(run)
    moments = training_moments(job) if beside is None else _with_critic(job, beside)
    if not run.num_versions:
        return moments
    resting = lasting_parts(job) if beside is None else _resting(job, beside)
    return (*moments, make_moment("syncing", "publishing", resting))


def _resting(job: TrainerJob, critic: TrainerJob | None) -> tuple[Part, ...]:
    """What trainer and critic hold between two steps."""
    beside = () if critic is None else owned(lasting_parts(critic), "critic")
    return (*owned(lasting_parts(job), "trainer"), *beside)


def _with_critic(job: TrainerJob, critic: TrainerJob) -> tuple[Moment, ...]:
    """The moments of a step of a trainer and of its critic on one GPU: each rests while the other computes."""
    found = []
    for worker, other, owner, at_rest in ((job, critic, "trainer", "critic"), (critic, job, "critic", "trainer")):
        resting = owned(lasting_parts(other), at_rest)
        for moment in training_moments(worker):
            name = moment.name if owner == "trainer" else f"critic: {moment.name}"
            found.append(Moment("training", name, (*owned(moment.parts, owner), *resting)))
    return tuple(found)


def _together(run: ResolvedRun, job: TrainerJob, card: Card | None) -> tuple[Moment, ...]:
    """A trainer and generators on one GPU. Which of them are awake at once is what the placement says."""
    critic = _critic_beside(run)
    resting = _resting(job, critic)
    guest = generator_job(run, card, occupied=sum(part.num_bytes for part in resting))
    assert guest is not None
    awake = _repeated(run, awake_parts(guest))
    while_training = _repeated(run, asleep_parts(guest)) if run.takes_turns else awake
    moments = [make_moment("generating", "decoding", (*resting, *awake))]
    of_trainer = [Moment(each.phase, each.name, owned(each.parts, "trainer")) for each in training_moments(job)]
    for moment in of_trainer if critic is None else _with_critic(job, critic):
        beside = make_moment("training", moment.name, while_training).parts
        moments.append(Moment("training", moment.name, (*moment.parts, *beside)))
    if run.num_versions:
        moments.append(make_moment("syncing", "publishing and fetching", (*resting, *awake)))
    return tuple(moments)


def _repeated(run: ResolvedRun, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    if run.num_generators == 1:
        return owned(parts, "generator")
    return tuple(part for number in range(run.num_generators) for part in owned(parts, f"generator {number}"))


def _generator_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    if run.generator is None or not run.generator_on_gpu:
        return ()
    if run.training is not None and run.placement != "apart":
        return ()
    job = generator_job(run, card)
    assert job is not None
    moment = make_moment("generating", "decoding", awake_parts(job))
    return (_device("generator", run.num_generators * run.tensor_parallel, card, (moment,)),)


def _critic_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    if run.critic is None or not run.critic.on_gpu or (run.critic.is_beside and run.trainer_on_gpu):
        return ()
    kinds, num_ranks = critic_jobs(run), run.critic.layout.num_ranks
    return tuple(_device(f"critic{kind}", num_ranks // len(kinds), card, training_moments(job)) for kind, job in kinds)


def _scoring_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    return tuple(_device(each.name, each.num_replicas, card, (each.moment(),)) for each in _scoring(run) if each.on_gpu)


def _scoring(run: ResolvedRun) -> tuple[Scoring, ...]:
    """The models that only score."""
    found = () if run.reward_model is None else (run.reward_model,)
    if not run.num_references or run.training is None or run.distributed is None:
        return found
    reference = Scoring("reference", run.sizes, run.num_references, run.reference_on_gpu, run.training, run.distributed)
    return (reference, *found)


def _teacher_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    if not run.teacher_on_gpu or not run.num_teachers:
        return ()
    count = run.num_teachers * (1 if run.teacher_generator is None else run.teacher_generator.tensor_parallel)
    return (_device("teacher", count, card, (_teacher_moment(run, card),)),)


def _teacher_moment(run: ResolvedRun, card: Card | None) -> Moment:
    assert run.teacher_facts is not None
    sizes, engine = Sizes.of(run.teacher_facts), run.teacher_generator
    if engine is None:
        assert run.training is not None and run.distributed is not None  # noqa: PT018
        copies, on_gpu = run.num_teachers, run.teacher_on_gpu
        return Scoring("teacher", sizes, copies, on_gpu, run.training, run.distributed).moment()
    job = GeneratorJob(
        run.teacher_facts,
        sizes,
        engine,
        max_seq_len=engine.max_seq_len or run.generator_seq_len,
        on_gpu=run.teacher_on_gpu,
        capacity=_capacity(run.teacher_on_gpu, card),
        tensor=engine.tensor_parallel,
        share=engine.gpu_memory_share,
    )
    return make_moment("generating", "scoring", awake_parts(job))


# ---- The host ------------------------------------------------------------------------------------------------------


def _host(run: ResolvedRun, card: Card | None, host_bytes: int | None) -> DevicePlan:
    """All processes of a run, as if they were on one host; what is on several is said in the name."""
    parts = [Part("controller", HOST_PROCESS, "this program", owner="controller")]
    moments: list[Moment] = []
    for _, job in trainer_jobs(run)[:1]:
        parts += _trainer_host(run, job)
        if not run.trainer_on_gpu:
            moments += training_moments(job)
    parts += _generator_host(run, card)
    parts += [each.host_part() for each in _scoring(run)]
    parts += _critic_host(run)
    parts += _teacher_host(run, card)
    common = tuple(parts)
    if not moments:
        moments = [Moment("training" if run.training is not None else "generating", "all processes", ())]
    joined = tuple(Moment(moment.phase, moment.name, (*common, *owned(moment.parts, "trainer"))) for moment in moments)
    return DevicePlan("host memory" if not run.is_spread else "host memory (of all hosts)", 1, host_bytes, joined)


def saved_bytes(job: TrainerJob) -> int:
    """Return the size of a checkpoint: what is trained and the optimizer's states, of all ranks."""
    return job.layout.num_ranks * (job.holding.trained * job.master + job.state_bytes)


def checkpoint_bytes(run: ResolvedRun) -> int:
    """Return the size of one checkpoint of a run on disk; 0 for a run that does not train."""
    return sum(saved_bytes(job) for _, job in trainer_jobs(run)[:1])


def _trainer_host(run: ResolvedRun, job: TrainerJob) -> list[Part]:
    num_ranks = job.layout.num_ranks
    each = HOST_GPU_PROCESS if run.trainer_on_gpu else HOST_PROCESS
    parts = [Part("trainer's processes", num_ranks * each, f"{num_ranks} rank(s)", owner="trainer")]
    if run.saves_beside:
        parts.append(Part("checkpoint", saved_bytes(job), "a copy while it is written", owner="trainer"))
    if run.num_versions and (run.is_spread or not run.trainer_on_gpu):
        size = run.num_versions * job.published_item * run.published_weights
        parts.append(Part("published weights", size, f"{run.num_versions} versions", owner="store"))
    if run.num_relays:
        size = run.num_relays * run.published_item * run.published_weights
        parts.append(Part("received weights", size, f"a version on {run.num_relays} other host(s)", owner="store"))
    if run.num_members:
        size = run.num_members * run.published_item * run.published_weights
        parts.append(Part("league", size, f"at most {run.num_members} versions of the policy", owner="store"))
    if run.num_pinned:
        size, why = (
            run.num_pinned * job.published_item * run.published_weights,
            f"{run.num_pinned} that agents are bound to",
        )
        parts.append(Part("pinned versions", size, why, owner="store"))
    if not run.num_versions and (run.num_members or run.num_pinned):
        size = 2 * job.published_item * run.published_weights  # with placement `shared`: one is left beside the next
        parts.append(Part("published weights", size, "to be pinned", owner="store"))
    if run.trainer_on_gpu and (waiting := offloaded_bytes(job)):
        parts.append(Part("offloaded activations", num_ranks * waiting, "pinned", owner="trainer"))
    return parts


def _generator_host(run: ResolvedRun, card: Card | None) -> list[Part]:
    job = generator_job(run, card)
    if job is None:
        return []
    num = run.num_generators
    if run.generator_on_gpu:
        parts = []
        if run.placement != "shared":
            count = num * run.tensor_parallel
            parts.append(Part("generators' processes", count * HOST_GPU_PROCESS, f"{count}", owner="generator"))
        if run.training is not None and run.placement == "turns":
            parts.append(Part("weights asleep", num * asleep_host_bytes(job), "while the trainer works"))
        return parts
    own = [] if run.placement == "shared" else [Part("generators' processes", num * HOST_PROCESS, f"{num}")]
    return [*own, *(part for number in range(num) for part in owned(awake_parts(job), f"generator {number}"))]


def _critic_host(run: ResolvedRun) -> list[Part]:
    if run.critic is None:
        return []
    num_ranks = run.critic.layout.num_ranks
    if run.critic.on_gpu:
        return [Part("critic's processes", num_ranks * HOST_GPU_PROCESS, f"{num_ranks} rank(s)", owner="critic")]
    fullest = max(moment.num_bytes for _, job in critic_jobs(run) for moment in training_moments(job))
    return [Part("critic", num_ranks * (HOST_PROCESS + fullest), f"{num_ranks} rank(s)", owner="critic")]


def _teacher_host(run: ResolvedRun, card: Card | None) -> list[Part]:
    if not run.num_teachers:
        return []
    if run.teacher_on_gpu:
        return [Part("teacher's processes", run.num_teachers * HOST_GPU_PROCESS, f"{run.num_teachers}")]
    size = HOST_PROCESS + _teacher_moment(run, card).num_bytes
    return [Part("teacher", run.num_teachers * size, f"{run.num_teachers} replica(s)")]
