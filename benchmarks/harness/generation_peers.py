"""The peers of `generation.py`: transformers' `generate` and vLLM's `LLM`, each with the settings that suit it best.

Run as a program in whatever environment has the peer: `generation_peers.py NAME FOLDER THREADS`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.generation_child import Made, Open, serve
from harness.generation_plan import Plan, Wanted

VLLM_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
"""vLLM in this process, which is its fastest way; without compiling, which takes 7 to 22 s at the first request."""
CACHE_BYTES = 1 << 30


# ---- transformers


class TransformersSide:
    """One batch of all prompts, padded on the left, that runs until the longest request has all its tokens.

    Logprobs of the sampled tokens are taken on the way, by a criterion for stopping that sees each step's scores before
    they are let go: cheaper than `output_scores`, which keeps the whole vocabulary for every token.
    """

    def __init__(self, folder: Path, plan: Plan, threads: int, *, with_logprobs: bool) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch, self._with_logprobs = torch, with_logprobs
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        self.about = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": self._model.config._attn_implementation,
        }

    def make(self, wanted: Sequence[Wanted], *, greedy: bool = False) -> list[Made]:
        torch = self._torch
        width, most = max(len(each.prompt_ids) for each in wanted), max(each.num_new for each in wanted)
        ids = torch.zeros(len(wanted), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(wanted):
            ids[row, width - len(each.prompt_ids) :] = torch.tensor(each.prompt_ids)
            mask[row, width - len(each.prompt_ids) :] = 1
        watch = _Watch(torch) if self._with_logprobs and not greedy else None
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=not greedy,
                **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
                max_new_tokens=most,
                eos_token_id=-1,
                pad_token_id=0,
                **({} if watch is None else {"logits_processor": [watch.see], "stopping_criteria": [watch.take]}),
            )
        tokens = found[:, width:].tolist()
        logprobs = [[] for _ in wanted] if watch is None else torch.stack(watch.logprobs, dim=1).tolist()
        return [
            Made(tokens[row][: each.num_new], logprobs[row][: each.num_new] if logprobs[row] else ())
            for row, each in enumerate(wanted)
        ]

    def close(self) -> None:
        pass


class _Watch:
    """Takes the logprob of each sampled token while its step's scores are still there."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._scores: Any = None
        self.logprobs: list[Any] = []

    def see(self, input_ids: Any, scores: Any) -> Any:
        self._scores = scores
        return scores

    def take(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        chosen = self._scores.gather(1, input_ids[:, -1:]).squeeze(1)
        self.logprobs.append(chosen - self._scores.logsumexp(-1))
        return self._torch.zeros(len(input_ids), dtype=self._torch.bool)


# ---- vLLM


class VllmSide:
    """`LLM.generate` in this process: continuous batching, packed weights, no text."""

    def __init__(self, folder: Path, plan: Plan, threads: int) -> None:
        import torch
        import vllm
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._llm = LLM(
            model=str(folder),
            dtype="float32",
            enforce_eager=True,
            max_model_len=plan.max_seq_len,
            max_num_seqs=plan.num_requests,
            kv_cache_memory_bytes=CACHE_BYTES,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            seed=0,
        )
        self.about = {"vllm": vllm.__version__, "torch": torch.__version__}

    def make(self, wanted: Sequence[Wanted], *, greedy: bool = False) -> list[Made]:
        params = [
            self._params(
                temperature=0.0 if greedy else 1.0,
                max_tokens=each.num_new,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for each in wanted
        ]
        prompts = [{"prompt_token_ids": list(each.prompt_ids)} for each in wanted]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [_of_vllm(output.outputs[0]) for output in outputs]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _of_vllm(output: Any) -> Made:
    chosen = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
    return Made(list(output.token_ids), chosen)


# ---- the program


def _import_transformers() -> None:
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401


def _import_vllm() -> None:
    os.environ.update(VLLM_SETTINGS)
    for name in ("torchvision", "torchaudio", "torchcodec"):  # builds for CUDA break imports beside torch for the CPU
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401


SIDES: dict[str, tuple[Open, Callable[[], None]]] = {
    "transformers": (
        lambda folder, plan, threads: TransformersSide(folder, plan, threads, with_logprobs=True),
        _import_transformers,
    ),
    "transformers-plain": (
        lambda folder, plan, threads: TransformersSide(folder, plan, threads, with_logprobs=False),
        _import_transformers,
    ),
    "vllm": (VllmSide, _import_vllm),
}

if __name__ == "__main__":
    _name, _folder, _threads = sys.argv[1:]
    _open, _imports = SIDES[_name]
    serve(_open, Path(_folder), threads=int(_threads), imports=_imports)
