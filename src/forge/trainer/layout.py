"""Which layouts over ranks a model admits, decided before any process holds a weight.

A layout that cannot work fails late and far from its cause: inside a mesh, in the first backward pass, or by waiting
for a rank that never comes. So every rule is here, as plain arithmetic on the configuration and the model's facts, and
each refusal names degrees that do fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from forge.config.schema import ModelConfig
from forge.config.training import DistributedConfig, TrainingConfig
from forge.errors import LayoutError

NUM_PROPOSALS = 4
NEEDED_FACTS = ("num_layers", "num_heads", "num_kv_heads", "vocab_size", "tie_embeddings", "max_seq_len")


@dataclass(frozen=True, slots=True)
class Layout:
    """How ranks share a model and its batches. Every degree is resolved; `check_layout` makes ones that work.

    Ranks are numbered with tensor parallel neighbours next to each other, then shards, then replicas, then pipeline
    ranks, which is the order of TorchTitan's mesh.

    Attributes:
        replicate: data parallel groups, each of which holds the whole model.
        shard: data parallel ranks that share one copy.
        tensor: ranks that split every layer.
        pipeline: ranks that split the layers.
        expert: ranks that split the experts; they are among `shard * tensor`.
        num_stages: parts that the layers are cut into, over all pipeline ranks.
        pipeline_microbatches: rows that go through a pipeline in one call; 1 without a pipeline.
        row_multiple: the length of every row is a multiple of it, since tensor parallel ranks split rows evenly.
        fixed_shape: whether every row has the same length.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    num_stages: int = 1
    pipeline_microbatches: int = 1
    row_multiple: int = 1
    fixed_shape: bool = False

    @property
    def data_parallel(self) -> int:
        """How many parts a batch is divided into."""
        return self.replicate * self.shard

    @property
    def num_ranks(self) -> int:
        return self.data_parallel * self.tensor * self.pipeline

    def data_rank(self, rank: int) -> int:
        """Return which part of a batch a rank takes. Tensor and pipeline neighbours take the same."""
        return rank // self.tensor % self.data_parallel

    def __str__(self) -> str:
        degrees = ("replicate", "shard", "tensor", "pipeline", "expert")
        named = [f"{name} {getattr(self, name)}" for name in degrees if getattr(self, name) > 1]
        return ", ".join(named) or "shard 1"


def check_layout(
    distributed: DistributedConfig, model: ModelConfig, training: TrainingConfig, *, num_ranks: int
) -> Layout:
    """Return the layout that the degrees ask for, on so many ranks.

    `model` must hold the facts of the architecture, from a preset or from its folder. Raises `LayoutError` with the
    first rule that is broken; its `path` is the key to change.
    """
    if num_ranks < 1:
        _refuse("there are no ranks", path="num_ranks", value=num_ranks, rule="at least 1", repair="start one or more")
    _check_facts(model)
    layout = _resolve(distributed, model, num_ranks=num_ranks)
    _check_strategy(distributed, layout)
    _check_tensor(layout, model)
    _check_pipeline(distributed, layout, model)
    _check_expert(layout, model)
    _check_rows(distributed, layout)
    _check_training(distributed, layout, model, training)
    return layout


def proposals(model: ModelConfig, num_ranks: int) -> tuple[Layout, ...]:
    """Return layouts of so many ranks that the model admits, the simplest first.

    Data parallel ranks share one copy in all of them, and there is one stage on each pipeline rank. There is always at
    least one, which only shards.
    """
    _check_facts(model)
    found = [
        Layout(
            shard=num_ranks // (tensor * pipeline),
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            num_stages=pipeline,
            pipeline_microbatches=2 * pipeline if pipeline > 1 else 1,
            row_multiple=tensor,
            fixed_shape=pipeline > 1,
        )
        for pipeline in _pipeline_degrees(model, num_ranks)
        for tensor in _divisors(num_ranks // pipeline)
        for expert in _expert_degrees(model, num_ranks // pipeline)
        if all(size % tensor == 0 for _, size in _tensor_sizes(model))
        and not _slices_experts(model, tensor=tensor, expert=expert)
    ]
    return tuple(sorted(found, key=_complexity))


def _refuse(message: str, *, path: str, value: object, rule: str, repair: str) -> NoReturn:
    raise LayoutError(message, path=path, value=value, rule=rule, repair=repair)


def _check_facts(model: ModelConfig) -> None:
    for name in NEEDED_FACTS if model.num_experts is not None else (*NEEDED_FACTS, "intermediate_size"):
        if getattr(model, name) is None:
            _refuse(
                "the model's architecture is not known well enough to lay it out",
                path=f"model.{name}",
                value=None,
                rule="must be known",
                repair="name a preset, or the folder of a model, or set it",
            )


def _resolve(distributed: DistributedConfig, model: ModelConfig, *, num_ranks: int) -> Layout:
    replicate, shard = _data_degrees(distributed, num_ranks=num_ranks)
    tensor, pipeline = distributed.tensor, distributed.pipeline
    if replicate * shard * tensor * pipeline != num_ranks:
        _refuse_product(distributed, model, num_ranks=num_ranks)
    stages = pipeline * _stages_per_rank(distributed.pipeline_schedule) if pipeline > 1 else 1
    splits_rows = distributed.sequence_parallel or distributed.expert > 1
    return Layout(
        replicate=replicate,
        shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        expert=distributed.expert,
        num_stages=stages,
        pipeline_microbatches=(distributed.pipeline_microbatches or 2 * stages) if pipeline > 1 else 1,
        row_multiple=tensor if splits_rows else 1,
        fixed_shape=pipeline > 1,
    )


def _data_degrees(distributed: DistributedConfig, *, num_ranks: int) -> tuple[int, int]:
    """Return replicate and shard, with -1 resolved. The caller refuses a product that does not come out."""
    left = num_ranks // (distributed.tensor * distributed.pipeline)
    if distributed.strategy == "none":
        return 1, 1
    if distributed.strategy == "replicate":
        return (left if distributed.replicate == 1 else distributed.replicate), 1
    if distributed.shard != -1:
        return distributed.replicate, distributed.shard
    return distributed.replicate, left // distributed.replicate


def _refuse_product(distributed: DistributedConfig, model: ModelConfig, *, num_ranks: int) -> NoReturn:
    degrees = {name: getattr(distributed, name) for name in ("replicate", "shard", "tensor", "pipeline")}
    if distributed.strategy == "none":
        rule = "tensor × pipeline must be the number of ranks, since the strategy `none` has no data parallel ones"
    elif distributed.shard == -1 or distributed.strategy == "replicate":
        rule = "replicate × tensor × pipeline must divide the number of ranks"
    else:
        rule = "replicate × shard × tensor × pipeline must be the number of ranks"
    asked = distributed.num_ranks
    start = f"start {_counted(asked, 'rank')}, or use" if asked != num_ranks else "use"
    _refuse(
        f"the degrees do not fit {_counted(num_ranks, 'rank')}",
        path="distributed",
        value=degrees,
        rule=f"{rule}, which is {num_ranks}",
        repair=f"{start} degrees that fit: {_proposed(model, num_ranks)}",
    )


def _check_strategy(distributed: DistributedConfig, layout: Layout) -> None:
    if distributed.strategy == "hsdp" and layout.shard < 2:
        _refuse(
            "there are no ranks left to share a copy",
            path="distributed.strategy",
            value="hsdp",
            rule=f"`hsdp` needs a shard of at least 2; {_counted(layout.num_ranks, 'rank')} leave {layout.shard}",
            repair="write `replicate`, lower distributed.replicate, or start more ranks",
        )


def _check_tensor(layout: Layout, model: ModelConfig) -> None:
    for name, size in _tensor_sizes(model):
        if size % layout.tensor:
            fitting = [
                degree
                for degree in _divisors(layout.num_ranks)
                if all(other % degree == 0 for _, other in _tensor_sizes(model))
            ]
            _refuse(
                f"a layer of this model cannot be split over {layout.tensor} tensor parallel ranks",
                path="distributed.tensor",
                value=layout.tensor,
                rule=f"must divide model.{name}, which is {size}",
                repair=f"set distributed.tensor to {_either(fitting)}; {_counted(layout.num_ranks, 'rank')} can be "
                f"used as: {_proposed(model, layout.num_ranks)}",
            )


def _check_pipeline(distributed: DistributedConfig, layout: Layout, model: ModelConfig) -> None:
    if layout.pipeline == 1:
        return
    proposed = f"{_counted(layout.num_ranks, 'rank')} can be used as: {_proposed(model, layout.num_ranks)}"
    if _is_tied(model):
        _refuse(
            "this model cannot be split into a pipeline",
            path="distributed.pipeline",
            value=layout.pipeline,
            rule="must be 1 where model.tie_embeddings is true: the tied weights would be on the first and the last "
            "rank",
            repair=f"set distributed.pipeline to 1; {proposed}",
        )
    if layout.num_stages > _fact(model.num_layers):
        each = _stages_per_rank(distributed.pipeline_schedule)
        fitting = [degree for degree in _divisors(layout.num_ranks) if degree * each <= _fact(model.num_layers)]
        other = "" if each == 1 else ", or distributed.pipeline_schedule to 1F1B"
        _refuse(
            "there are more pipeline stages than layers",
            path="distributed.pipeline",
            value=layout.pipeline,
            rule=f"{distributed.pipeline_schedule} has {_counted(each, 'stage')} on each pipeline rank, and there may "
            f"be at most model.num_layers of them, which is {model.num_layers}",
            repair=f"set distributed.pipeline to {_either(fitting or [1])}{other}; {proposed}",
        )
    _check_microbatches(distributed, layout)


def _check_microbatches(distributed: DistributedConfig, layout: Layout) -> None:
    """Refuse what the schedules of torch.distributed.pipelining refuse when they are built, or hang on."""
    count = layout.pipeline_microbatches
    if distributed.pipeline_schedule == "1F1B" and count < layout.num_stages:
        rule = f"at least the number of stages, which is {layout.num_stages}, for 1F1B"
    elif distributed.pipeline_schedule == "Interleaved1F1B" and count % max(1, count // layout.pipeline):
        rounds = count // layout.pipeline
        rule = f"a multiple of its whole rounds over {layout.pipeline} pipeline ranks, which are {rounds}"
    else:
        return
    _refuse(
        "the pipeline cannot be scheduled",
        path="distributed.pipeline_microbatches",
        value=count,
        rule=rule,
        repair=f"set it to {2 * layout.num_stages} or another multiple of {layout.num_stages}, or to null",
    )


def _check_expert(layout: Layout, model: ModelConfig) -> None:
    group = layout.shard * layout.tensor
    if layout.expert == 1:
        if _slices_experts(model, tensor=layout.tensor, expert=1):
            fitting_degrees = _expert_degrees(model, group)[1:]
            expert = f"set distributed.expert to {_either(fitting_degrees)}, or " if fitting_degrees else "set "
            _refuse(
                "tensor parallel ranks that each hold a slice of every expert get a wrong gradient of the router",
                path="distributed.expert",
                value=1,
                rule="more than 1 for a mixture on tensor parallel ranks, so that each holds whole experts",
                repair=f"{expert}distributed.tensor to 1",
            )
        return
    fitting = f"set distributed.expert to {_either(_expert_degrees(model, group))}"
    if model.num_experts is None:
        problem = "this model has no experts to split"
        rule, fitting = "must be 1 for a dense model", "set distributed.expert to 1"
    elif model.num_experts % layout.expert:
        problem = f"the experts cannot be split over {layout.expert} ranks"
        rule = f"must divide model.num_experts, which is {model.num_experts}"
    elif group % layout.expert:
        problem = "the ranks that hold one copy cannot be divided into groups of that size"
        rule = f"must divide shard × tensor, which is {layout.shard} × {layout.tensor}: experts are split among the "
        rule += "ranks of one copy and one pipeline stage"
    else:
        return
    _refuse(problem, path="distributed.expert", value=layout.expert, rule=rule, repair=fitting)


def _check_rows(distributed: DistributedConfig, layout: Layout) -> None:
    if layout.tensor > 1 and layout.expert > 1 and not distributed.sequence_parallel:
        _refuse(
            "experts split among tensor-parallel ranks need sequence parallelism",
            path="distributed.sequence_parallel",
            value=False,
            rule="must be true where distributed.tensor and distributed.expert are over 1",
            repair="set it to true, or set distributed.tensor to 1",
        )


def _check_training(
    distributed: DistributedConfig, layout: Layout, model: ModelConfig, training: TrainingConfig
) -> None:
    longest = _fact(model.max_seq_len)
    if training.max_seq_len > longest:
        _refuse(
            "samples may be longer than the model supports",
            path="training.max_seq_len",
            value=training.max_seq_len,
            rule=f"at most model.max_seq_len, which is {longest}",
            repair=f"lower it to {longest}",
        )
    if training.activation_offload and distributed.with_gpus is False:
        _refuse(
            "activations cannot be offloaded: they are in host memory already",
            path="training.activation_offload",
            value=True,
            rule="only for ranks with GPUs",
            repair="set it to false; training.activation_checkpointing saves memory on a CPU",
        )
    if training.compile and layout.pipeline > 1:
        _refuse(
            "the stages of a pipeline are not compiled",
            path="training.compile",
            value=True,
            rule=f"must be false where distributed.pipeline is over 1; it is {layout.pipeline}",
            repair="set it to false, or set distributed.pipeline to 1",
        )


def _tensor_sizes(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield what tensor parallel ranks divide among them. Experts stay whole: `expert` splits those."""
    for name in ("num_heads", "num_kv_heads", "vocab_size"):
        yield name, _fact(getattr(model, name))
    if model.num_experts is None:
        yield "intermediate_size", _fact(model.intermediate_size)


def _slices_experts(model: ModelConfig, *, tensor: int, expert: int) -> bool:
    return model.num_experts is not None and tensor > 1 and expert == 1


def _pipeline_degrees(model: ModelConfig, num_ranks: int) -> list[int]:
    most = 1 if _is_tied(model) else _fact(model.num_layers)
    return [degree for degree in _divisors(num_ranks) if degree <= most]


def _is_tied(model: ModelConfig) -> bool:
    """Whether the output layer is the embedding: a scalar head is not."""
    return bool(model.tie_embeddings) and model.head == "language"


def _expert_degrees(model: ModelConfig, group: int) -> list[int]:
    return [degree for degree in _divisors(group) if (model.num_experts or 1) % degree == 0]


def _complexity(layout: Layout) -> tuple[int, ...]:
    degrees = (layout.pipeline, layout.tensor, layout.expert)
    return (sum(degree > 1 for degree in degrees), *degrees)


def _stages_per_rank(schedule: str) -> int:
    return 2 if schedule == "Interleaved1F1B" else 1


def _fact(value: int | None) -> int:
    assert value is not None, "_check_facts comes first"
    return value


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def _proposed(model: ModelConfig, num_ranks: int) -> str:
    return "; ".join(str(layout) for layout in proposals(model, num_ranks)[:NUM_PROPOSALS])


def _either(values: Iterable[int]) -> str:
    *most, last = [str(value) for value in values]
    return f"{', '.join(most)} or {last}" if most else last


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
