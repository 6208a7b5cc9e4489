"""Who is on which GPU, and what is alive there at the same time."""

from __future__ import annotations

from dataclasses import replace

from forge.memory.card import Card, host_memory
from forge.memory.constants import HOST_GPU_PROCESS, HOST_PROCESS
from forge.memory.generator import GeneratorJob, asleep_host_bytes, asleep_parts, awake_parts
from forge.memory.records import MASTER_BYTES, DevicePlan, Holding, MemoryPlan, Moment, Part, holdings, owned
from forge.memory.resolved import ResolvedRun
from forge.memory.trainer import (
    TrainerJob,
    lasting_parts,
    make_moment,
    offloaded_bytes,
    scoring_moment,
    training_moments,
)

_NO_LIMIT = 1 << 62


def plan_memory(run: ResolvedRun, *, card: Card | None = None, host_bytes: int | None = None) -> MemoryPlan:
    """The memory of a run on GPUs like `card`, or on CPUs.

    `host_bytes` is the memory of a host; None for what this one has where the run is on CPUs, and for no limit where it
    is on GPUs, which may be elsewhere.
    """
    gpus = _trainer_gpus(run, card) + _generator_gpus(run, card) + _reference_gpus(run, card)
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
    return tuple((name, _trainer_job(run, holding)) for name, holding in holdings(run.sizes, run.layout))


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
        caches_logits=run.generator is not None,
        num_versions=min(1, versions) if run.is_spread else versions,  # staging on the way to the host
    )
    return replace(job, published_item=run.published_item)


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
        capacity=(card.usable if card is not None else _NO_LIMIT) if on_gpu else (host_memory() or _NO_LIMIT),
        tensor=run.tensor_parallel,
        share=run.share,
        occupied=occupied,
        is_guest=run.placement == "shared",
        takes_turns=run.takes_turns,
        num_alike=run.num_generators if run.placement != "apart" else 1,
        kept_item=MASTER_BYTES[run.distributed.precision] if run.distributed is not None else None,
    )


def _device(name: str, count: int, card: Card | None, moments: tuple[Moment, ...]) -> DevicePlan:
    return DevicePlan(name, count, card.usable if card is not None else None, moments)


def _trainer_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    if not run.trainer_on_gpu or run.layout is None:
        return ()
    kinds = trainer_jobs(run)
    devices: list[DevicePlan] = []
    has_guests = run.placement != "apart" and run.generator_on_gpu
    for index, (kind, job) in enumerate(kinds):
        count = run.layout.num_ranks // len(kinds)
        if has_guests and index == 0:  # generators are on the first of the trainer's GPUs
            hosting = min(run.tensor_parallel, count)
            devices.append(_device(f"trainer{kind} + generator", hosting, card, _together(run, job, card)))
            count -= hosting
        if count:
            devices.append(_device(f"trainer{kind}", count, card, _alone(run, job)))
    return tuple(devices)


def _alone(run: ResolvedRun, job: TrainerJob) -> tuple[Moment, ...]:
    moments = training_moments(job)
    if not run.num_versions:
        return moments
    return (*moments, make_moment("syncing", "publishing", lasting_parts(job)))


def _together(run: ResolvedRun, job: TrainerJob, card: Card | None) -> tuple[Moment, ...]:
    """A trainer and generators on one GPU. Which of them are awake at once is what the placement says."""
    resting = owned(lasting_parts(job), "trainer")
    guest = generator_job(run, card, occupied=sum(part.num_bytes for part in resting))
    assert guest is not None
    awake = _repeated(run, awake_parts(guest))
    while_training = _repeated(run, asleep_parts(guest)) if run.takes_turns else awake
    moments = [make_moment("generating", "decoding", (*resting, *awake))]
    for moment in training_moments(job):
        beside = make_moment("training", moment.name, while_training).parts
        moments.append(Moment("training", moment.name, (*owned(moment.parts, "trainer"), *beside)))
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


def _reference_gpus(run: ResolvedRun, card: Card | None) -> tuple[DevicePlan, ...]:
    if not run.reference_on_gpu or not run.num_references:
        return ()
    return (_device("reference", run.num_references, card, (_reference_moment(run, on_gpu=True),)),)


def _reference_moment(run: ResolvedRun, *, on_gpu: bool) -> Moment:
    from forge.trainer.layout import Layout

    assert run.training is not None and run.distributed is not None  # noqa: PT018
    alone = Layout()
    ((_, whole),) = holdings(run.sizes, alone)
    job = TrainerJob(run.sizes, whole, alone, run.training, run.distributed, on_gpu=on_gpu)
    return scoring_moment(job)


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
    parts += _reference_host(run)
    common = tuple(parts)
    if not moments:
        moments = [Moment("training" if run.training is not None else "generating", "all processes", ())]
    joined = tuple(Moment(moment.phase, moment.name, (*common, *owned(moment.parts, "trainer"))) for moment in moments)
    return DevicePlan("host memory" if not run.is_spread else "host memory (of all hosts)", 1, host_bytes, joined)


def _trainer_host(run: ResolvedRun, job: TrainerJob) -> list[Part]:
    num_ranks = job.layout.num_ranks
    each = HOST_GPU_PROCESS if run.trainer_on_gpu else HOST_PROCESS
    state = 2 if job.training.optimizer_dtype == "bfloat16" else job.master
    parts = [Part("trainer's processes", num_ranks * each, f"{num_ranks} rank(s)", owner="trainer")]
    if run.saves_beside:
        saved = num_ranks * job.holding.held * (job.master + 2 * state)
        parts.append(Part("checkpoint", saved, "a copy while it is written", owner="trainer"))
    if run.num_versions and (run.is_spread or not run.trainer_on_gpu):
        size = run.num_versions * job.published_item * run.sizes.total
        parts.append(Part("published weights", size, f"{run.num_versions} versions", owner="store"))
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


def _reference_host(run: ResolvedRun) -> list[Part]:
    if not run.num_references:
        return []
    if run.reference_on_gpu:
        return [Part("reference's processes", run.num_references * HOST_GPU_PROCESS, f"{run.num_references}")]
    moment = _reference_moment(run, on_gpu=False)
    size = HOST_PROCESS + moment.num_bytes
    return [Part("reference", run.num_references * size, f"{run.num_references} replica(s)")]
