"""The chunked head with the vocabulary split over two ranks, against one process."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.errors import DataError
from forge.losses import chunked_logprobs, chunked_nll

NUM_RANKS = 2
SPLITS = ((6, 5), (9, 2), (11, 0))
VOCAB = 11
LIMIT_S = 600

Found = dict[str, torch.Tensor]


def inputs() -> dict[str, torch.Tensor]:
    maker = torch.Generator().manual_seed(29)
    made = {
        "hidden": 2 * torch.randn(13, 7, generator=maker, dtype=torch.float64),
        "weight": torch.randn(VOCAB, 7, generator=maker, dtype=torch.float64),
        "weights": torch.rand(13, generator=maker, dtype=torch.float64),
        "by_logprob": torch.randn(13, generator=maker, dtype=torch.float64),
        "by_entropy": torch.randn(13, generator=maker, dtype=torch.float64),
    }
    return made | {"targets": torch.arange(13) % VOCAB}


def compute(rows: slice, **place: Any) -> Found:
    """Everything that the head gives, for some rows of the weight."""
    made = inputs()
    leaves = (made["hidden"].requires_grad_(), made["weight"][rows].clone().requires_grad_())
    logprobs, entropy = chunked_logprobs(
        *leaves, made["targets"], chunk_tokens=5, temperature=0.8, entropy=True, **place
    )
    assert entropy is not None
    mixed = made["by_logprob"] @ logprobs + made["by_entropy"] @ entropy
    by_mixed = torch.autograd.grad(mixed, leaves)
    plain, _ = chunked_logprobs(*leaves, made["targets"], chunk_tokens=5, **place)
    by_plain = torch.autograd.grad(made["by_logprob"] @ plain, leaves)
    total, scored = chunked_nll(*leaves, made["targets"], made["weights"], chunk_tokens=5, **place)
    by_nll = torch.autograd.grad(total, leaves)
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "total": total.detach(),
        "scored": scored,
        "hidden of both": by_mixed[0],
        "hidden of logprobs": by_plain[0],
        "hidden of nll": by_nll[0],
        "weight of both": by_mixed[1],
        "weight of logprobs": by_plain[1],
        "weight of nll": by_nll[1],
    }


def refuse(rows: slice, **place: Any) -> str:
    """What is said about a target that no rank has."""
    made = inputs()
    made["targets"][4] = VOCAB
    with pytest.raises(DataError) as caught:
        chunked_nll(made["hidden"], made["weight"][rows], made["targets"], made["weights"], **place)
    return str(caught.value.rule)


def one_rank(rank: int, folder: str) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_RANKS, timeout=limit)
    found: dict[Any, Any] = {}
    for split in SPLITS:
        start = sum(split[:rank])
        rows = slice(start, start + split[rank])
        place = {"group": dist.group.WORLD, "vocab_start": start}
        found[split] = compute(rows, **place) | {"refusal": refuse(rows, **place)}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.barrier()  # nobody leaves while the other still talks to it
    os._exit(0)  # tearing gloo down beside an interpreter that ends was seen to abort


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=one_rank, args=(rank, str(folder))) for rank in range(NUM_RANKS)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(LIMIT_S)
        assert [process.exitcode for process in processes] == [0] * NUM_RANKS
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_vocabulary_gives_what_a_whole_one_does(ranks: list[dict[Any, Any]], split: tuple[int, int]) -> None:
    whole = compute(slice(0, VOCAB))
    parts = [found[split] for found in ranks]
    for name, expected in whole.items():
        if name.startswith("hidden"):  # each rank has its part of the sum
            results = [parts[0][name] + parts[1][name]]
        elif name.startswith("weight"):  # each rank has its rows
            results = [torch.cat([part[name] for part in parts])]
        else:  # each rank has all
            results = [part[name] for part in parts]
        for result in results:
            torch.testing.assert_close(
                result, expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("split", SPLITS)
def test_a_target_that_no_rank_has_is_refused_by_all(ranks: list[dict[Any, Any]], split: tuple[int, int]) -> None:
    for found in ranks:
        assert "below 11," in found[split]["refusal"]
