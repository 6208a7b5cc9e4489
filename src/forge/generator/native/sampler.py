"""Sample the next token of many completions at once.

`forge.generator.native.shaping` has the order in which penalties, temperature and truncation apply. A token is then
sampled with *one* uniform number by inverting the distribution function in the order of the vocabulary. That number
depends on the completion's seed and on the token's place in it (`forge.generator.native.randomness`), so that a seed
samples the same tokens from the same logits whatever else is in the batch.

On a CPU every bit of a row's result is a function of that row, and on a GPU too where nothing but a temperature shapes
the distribution (`forge.generator.native.gpu_sampling`). With penalties, truncation or greedy rows, a GPU may split the
sums of a row in another way for another number of rows: logprobs can then differ in their last digits, and so, rarely,
can a token whose uniform number lies within such a rounding error of the boundary to the next one.

Shapes: S rows, V the vocabulary, N blocks of `_BLOCK` tokens each.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge.config import Sampling
from forge.errors import ModelError, NonFiniteError
from forge.generator.native import gpu_sampling
from forge.generator.native.randomness import uniforms
from forge.generator.native.shaping import Shaping, TokenCounts, is_shaped, must_continue
from forge.generator.native.transfer import HostCopy, put
from forge.kernels.cpu_sampling import BLOCK, sample_tokens, single_thread

_BLOCK: Final = BLOCK
_BLOCK_UNITS: Final = 2.0**60  # what a probability of 1 is in whole numbers: exact sums, in any order
_TOKEN_UNITS: Final = 2.0**52  # the same within a block; 128 of them stay below 2^63
_FEW_LOGITS: Final = 1 << 18  # up to so many, a CPU's other threads cost more than they bring


@dataclass(slots=True, eq=False)
class SampleRow:
    """One completion, as the sampler sees it. The same object is given at every step of it.

    Attributes:
        sampling: its sampling parameters.
        seed: the completion's own (`randomness.completion_seed`), from 0 to 2^63 - 1.
        prompt_ids: the prompt, for the repetition penalty.
        token_ids: the tokens sampled so far; the caller of `sample` appends to it.
        stop_ids: tokens that end it, which are not sampled before `sampling.min_tokens`.
    """

    sampling: Sampling
    seed: int
    prompt_ids: Sequence[int]
    token_ids: list[int]
    stop_ids: Collection[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One token for each row, on the device, and on its way to the host.

    Attributes:
        token_ids: int64 [S], each below V whatever the logits were.
        logprobs: float32 [S], in the distribution that was sampled from; at temperature 0, that of temperature 1 with
            penalties. NaN for rows whose logits are not finite.
        full_logprobs: float32 [S], before penalties and truncation: what a trainer computes at that temperature, on a
            CPU bit for bit.
    """

    token_ids: Tensor
    logprobs: Tensor
    full_logprobs: Tensor
    _host_copy: HostCopy = field(init=False, repr=False)

    def __post_init__(self) -> None:
        packed = torch.stack([self.token_ids.double(), self.logprobs.double(), self.full_logprobs.double()])
        object.__setattr__(self, "_host_copy", HostCopy(packed))

    def wait(self) -> None:
        """Wait until the device has sampled these: what was launched before is done too."""
        self._host_copy.wait()

    def fetch(self, *, skip: Collection[int] = ()) -> tuple[list[int], list[float], list[float]]:
        """Return tokens, logprobs and full logprobs on the host: the one wait for the device in a step.

        It waits for these alone, and not for what was launched after them.
        Raises `NonFiniteError` if a row's logits were NaN or infinite, or no token was allowed; its `value` is the
        tuple of such rows. Call again with `skip=error.value` for the others' tokens.
        """
        found = self._host_copy.wait()
        rows = np.flatnonzero(~np.isfinite(found[1:]).all(axis=0)).tolist()
        broken = tuple(row for row in rows if row not in skip)
        tokens, logprobs, full = found.tolist()
        if broken:
            raise NonFiniteError(
                f"cannot sample a token for {len(broken)} of {len(tokens)} completions: the model's logits are NaN or "
                "infinite, or every token is ruled out",
                path="logits",
                value=broken,
                rule="logits that are numbers, with at least one token that is allowed",
                repair="check the weights that were loaded; in half precision, try generator.precision=float32",
            )
        return [int(token) for token in tokens], logprobs, full


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What is known about a list of rows until it changes.

    Attributes:
        rows: the list; seeds: uint64 [S].
        scale_S1: what logits are multiplied by; None where all of it is 1.
        is_greedy_S: None where no row is greedy; is_all_greedy: whether all are.
        shaping: for the rows that need it.
        going_on: rows that may not end yet: when that changes, so does the plan.
    """

    rows: tuple[SampleRow, ...]
    seeds: NDArray[np.uint64]
    scale_S1: Tensor | None
    is_greedy_S: Tensor | None
    is_all_greedy: bool
    shaping: Shaping | None
    going_on: tuple[SampleRow, ...]

    @property
    def is_plain(self) -> bool:
        """Whether every row samples from a softmax that only a temperature shapes."""
        return self.shaping is None and self.is_greedy_S is None

    def is_for(self, rows: Sequence[SampleRow]) -> bool:
        return (
            len(rows) == len(self.rows)
            and all(map(operator.is_, rows, self.rows))
            and all(map(must_continue, self.going_on))
        )


class Sampler:
    """Draws tokens for a vocabulary on a device. Not to be used by two threads at once.

    It keeps about 8 bytes for each row and token of the vocabulary, and 8 to 12 more for rows with penalties or
    truncation. On a GPU, top-p takes about as much again for a moment.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._token_counts = TokenCounts(vocab_size, self._device)
        self._plan = self._planned([])
        width = -(-vocab_size // _BLOCK) * _BLOCK
        self._probs = _Space(width, self._device)  # what is beyond the vocabulary stays 0
        self._scaled, self._shaped, self._shaped_probs = (_Space(vocab_size, self._device) for _ in range(3))

    @property
    def is_shaping(self) -> bool:
        """Whether anything but a temperature shaped the last step. Rows that were plain stay plain."""
        return self._plan.shaping is not None

    @torch.no_grad()
    def sample(self, logits_SV: Tensor, rows: Sequence[SampleRow], *, num_ahead: int | Sequence[int] = 0) -> Sampled:
        """One token for each row of the logits, float32 or, on a GPU, bfloat16 [S, V], which stay as they are.

        Nothing is waited for on a GPU, where only one small copy goes in. Rows whose logits are not finite give no
        error here but in `Sampled.fetch`.

        `num_ahead` tokens of each row have been sampled, or guessed, that are not among its `token_ids` yet. That is
        only for rows that nothing shapes (`is_shaping`): the shaped must know their tokens. Such a row may be there
        several times.
        """
        self._check(logits_SV, rows)
        if not self._plan.is_for(rows):
            self._plan = self._planned(rows)
        if logits_SV.is_cpu and logits_SV.numel() <= _FEW_LOGITS:
            with single_thread():
                return self._sample(logits_SV, self._plan, num_ahead)
        return self._sample(logits_SV, self._plan, num_ahead)

    def _sample(self, logits_SV: Tensor, plan: _Plan, num_ahead: int | Sequence[int]) -> Sampled:
        uniforms_S = self._copy_in(plan, num_ahead)
        if plan.is_plain and gpu_sampling.takes(logits_SV):
            sampled, logprobs = gpu_sampling.sample(logits_SV, uniforms_S, scale_S1=plan.scale_S1)
            return Sampled(sampled, logprobs, logprobs)
        logits_SV = logits_SV.float()
        scaled_SV, probs_SW = self._softmaxes(logits_SV, plan)
        lse_S = _logsumexp(scaled_SV, probs_SW)
        best_S = None if plan.is_greedy_S is None else _argmax(scaled_SV)
        if plan.shaping is not None:
            shaped_PV = plan.shaping.apply(logits_SV, out_SV=self._shaped.rows(len(plan.shaping.places_S)))
            shaped_probs_PV = torch.softmax(shaped_PV, dim=-1, out=self._shaped_probs.rows(len(shaped_PV)))
            shaped_lse_P = _logsumexp(shaped_PV, shaped_probs_PV)
            probs_SW[:, : self.vocab_size].index_copy_(0, plan.shaping.places_S, shaped_probs_PV)
            if best_S is not None:
                best_S.index_copy_(0, plan.shaping.places_S, _argmax(shaped_PV))
        if best_S is not None and plan.is_all_greedy:
            token_ids = best_S
        else:
            token_ids = pick(probs_SW, uniforms_S).clamp_(max=self.vocab_size - 1)
            if best_S is not None:
                token_ids = torch.where(plan.is_greedy_S, best_S, token_ids)
        full = _at(scaled_SV, token_ids) - lse_S
        logprobs = full
        if plan.shaping is not None:
            own = _at(shaped_PV, token_ids.index_select(0, plan.shaping.places_S)) - shaped_lse_P
            logprobs = full.index_copy(0, plan.shaping.places_S, own)
        return Sampled(token_ids, logprobs, full)

    def _check(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        wanted = (len(rows), self.vocab_size)
        dtypes = gpu_sampling.DTYPES if logits.is_cuda else (torch.float32,)
        if tuple(logits.shape) != wanted or logits.dtype not in dtypes:
            raise ModelError(
                "the logits do not match the rows to sample tokens for",
                path="logits_SV",
                value=(tuple(logits.shape), str(logits.dtype)),
                rule=f"float32 of the shape {wanted}: one row for each completion, one column for each token",
                repair="pass the model's logits, one row for each SampleRow, converted with .float()",
            )

    def _planned(self, rows: Sequence[SampleRow]) -> _Plan:
        device = self._device
        greedy = [row.sampling.is_greedy for row in rows]
        scales = [1.0 if row.sampling.is_greedy else 1.0 / row.sampling.temperature for row in rows]
        shaped = [place for place, row in enumerate(rows) if is_shaped(row, self.vocab_size)]
        if not shaped:
            self._token_counts.follow(())
        return _Plan(
            rows=tuple(rows),
            seeds=np.array([row.seed for row in rows], dtype=np.uint64),
            scale_S1=None if set(scales) <= {1.0} else put(np.array(scales, dtype=np.float32), device)[:, None],
            is_greedy_S=put(np.array(greedy), device) if any(greedy) else None,
            is_all_greedy=all(greedy),
            shaping=Shaping([rows[place] for place in shaped], shaped, self._token_counts) if shaped else None,
            going_on=tuple(row for row in rows if must_continue(row)),
        )

    def _copy_in(self, plan: _Plan, num_ahead: int | Sequence[int]) -> Tensor:
        """Return the uniform numbers [S], and add the tokens sampled since to the counts, in one copy to the device."""
        places, pairs = self._token_counts.fresh()
        if plan.is_all_greedy and not places:
            return torch.empty(0, dtype=torch.float64, device=self._device)
        num_rows = len(plan.rows)
        steps = np.fromiter((len(row.token_ids) for row in plan.rows), dtype=np.uint64, count=num_rows)
        steps += np.asarray(num_ahead, dtype=np.uint64)
        words = np.concatenate([uniforms(plan.seeds, steps).view(np.int64), np.array(places + pairs, dtype=np.int64)])
        copied = put(words, self._device)
        self._token_counts.add(copied[num_rows : num_rows + len(places)], copied[num_rows + len(places) :])
        return copied[:num_rows].view(torch.float64)

    def _softmaxes(self, logits: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
        """Return logits divided by temperature, and their probabilities, padded to whole blocks."""
        probs, scaled = self._probs.rows(len(plan.rows)), logits
        if plan.scale_S1 is not None:
            scaled = torch.mul(logits, plan.scale_S1, out=self._scaled.rows(len(plan.rows)))
        if probs.shape == scaled.shape:
            torch.softmax(scaled, dim=-1, out=probs)
        else:
            probs[:, : self.vocab_size].copy_(torch.softmax(scaled, dim=-1))
        return scaled, probs


class _Space:
    """Memory for a number of rows, reused at every step: fresh pages cost a CPU more than the computation."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._rows = torch.zeros(0, width, device=device)

    def rows(self, num_rows: int) -> Tensor:
        """Return the first rows, float32: zeros, or what was written there before."""
        if num_rows > len(self._rows):
            self._rows = torch.zeros(num_rows, self._rows.shape[1], device=self._rows.device)
        return self._rows[:num_rows]


def pick(probs_SW: Tensor, uniforms_S: Tensor) -> Tensor:
    """Return for each row the token at which the running sum of probabilities exceeds its uniform number, int64 [S].

    `probs_SW` is float32 and W a multiple of 128; rows need not add up to exactly 1. First the block is found, then the
    token within it. Running sums are of whole numbers and therefore exact: they never pass over a token of probability
    0, in whatever order a device adds, and a token is reached if its probability is above about 2^-50.
    """
    found = sample_tokens(probs_SW, uniforms_S) if probs_SW.is_cpu else None
    return _pick_by_torch(probs_SW, uniforms_S) if found is None else found


def _pick_by_torch(probs_SW: Tensor, uniforms_S: Tensor) -> Tensor:
    blocks_SNB = probs_SW.unflatten(1, (-1, _BLOCK))
    sums_SN = (blocks_SNB.sum(-1).double() * _BLOCK_UNITS).to(torch.int64)
    block_S, rest_S = _invert(sums_SN, uniforms_S)
    inside_SB = blocks_SNB[torch.arange(len(block_S), device=block_S.device), block_S].double()
    units_SB = (inside_SB / inside_SB.amax(-1, keepdim=True) * _TOKEN_UNITS).to(torch.int64)
    token_S, _ = _invert(units_SB, rest_S)
    return block_S * _BLOCK + token_S


def _invert(weights_SN: Tensor, uniforms_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the uniform number falls among whole weights, and how far into that one, in [0, 1), float64."""
    sums_SN = weights_SN.cumsum(-1)
    total_S1 = sums_SN[:, -1:]
    target_S1 = torch.minimum((uniforms_S[:, None] * total_S1.double()).to(torch.int64), total_S1 - 1)
    place_S1 = torch.searchsorted(sums_SN, target_S1, right=True).clamp_(max=sums_SN.shape[1] - 1)
    weight_S1 = weights_SN.gather(1, place_S1)
    into_S1 = target_S1 - (sums_SN.gather(1, place_S1) - weight_S1)
    return place_S1.squeeze(1), (into_S1.double() / weight_S1.double()).squeeze(1)


def _logsumexp(logits_SV: Tensor, probs_SW: Tensor) -> Tensor:
    # As `forge.losses.chunks` has it, operation by operation, so that logprobs have the trainer's bits.
    return logits_SV.amax(-1) - probs_SW.amax(-1).log()


def _at(logits_SV: Tensor, token_ids_S: Tensor) -> Tensor:
    return logits_SV.gather(1, token_ids_S[:, None]).squeeze(1)


def _argmax(logits_SV: Tensor) -> Tensor:
    """Return the first largest logit of each row. NumPy is ten times faster than torch on a CPU."""
    if logits_SV.is_cuda:
        return logits_SV.argmax(-1)
    found: NDArray[Any] = logits_SV.numpy().argmax(-1)
    return torch.from_numpy(found)
