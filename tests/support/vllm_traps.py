"""A program that walks into vLLM's traps without our help, and says what happened; its last engines are orphaned.

usage: vllm_traps.py     prints lines of JSON; after the last it waits to be killed
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
from typing import Any

from forge.config import Sampling
from forge.generator.vllm.environment import engine_environment, hide_broken
from forge.models.weight_names import hf_views
from forge.store import Weights
from generator_bench import make_engine
from vllm_kit import PROMPT, config, judged, request, tiny, weights

PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 1 << 26,
    "disable_log_stats": True,
}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def tied_head() -> None:
    """Reload a model with tied embeddings as vLLM does it, and see from which weights its logits come."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    llm = LLM(model=str(tiny().folder), enable_lora=True, max_lora_rank=8, max_logprobs=512, **PLAIN)

    def first_logprobs() -> torch.Tensor:
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=-1)
        (output,) = llm.generate([{"prompt_token_ids": list(PROMPT)}], params, use_tqdm=False)
        table = output.outputs[0].logprobs[0]
        return torch.tensor([table[token].logprob for token in range(len(table))], dtype=torch.float64)

    def off(seed: int) -> float:
        llm.reset_prefix_cache()
        return float((first_logprobs() - judged(seed, PROMPT)[-1]).abs().max())

    before = off(0)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    model = worker.model_runner.model
    with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(hf_views(weights(1), tiny().architecture))
        finalize_layerwise_reload(model, worker.model_config)
    reloaded = off(1)
    from forge.generator.vllm.transfer import repack_tied_head

    repack_tied_head(model)
    say(trap="tied head", before=before, reloaded=reloaded, repacked=off(1))
    prompts = [{"prompt_token_ids": list(PROMPT)}, {"prompt_token_ids": list(PROMPT[:9])}]
    try:
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0), use_tqdm=False)
    except Exception as error:  # noqa: BLE001 - which one is up to vLLM
        say(trap="prompt logprobs with adapters", error=type(error).__name__)
    else:
        say(trap="prompt logprobs with adapters", error=None)
    llm.llm_engine.engine_core.shutdown()


def seeded_pieces() -> None:
    """Read prompts in pieces for requests that have seeds."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(tiny().folder), max_num_batched_tokens=32, **PLAIN)
    prompts = [{"prompt_token_ids": list(PROMPT)}] * 3
    try:
        llm.generate(prompts, SamplingParams(max_tokens=2, seed=1), use_tqdm=False)
    except Exception as error:  # noqa: BLE001 - which one is up to vLLM
        say(trap="seeded prompts in pieces", error=type(error).__name__)
    else:
        say(trap="seeded prompts in pieces", error=None)
    llm.llm_engine.engine_core.shutdown()


def expand() -> None:
    """Spread temperatures over speculated tokens, as vLLM's sampler for the CPU does it."""
    import torch
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    output = torch.full((3,), -1.0)
    _expand_kernel_impl(output, torch.tensor([0.5]), torch.tensor([3]), 0, 1)
    say(trap="speculated temperatures", found=output.tolist())


async def orphans() -> None:
    """Start two engines, ours and one of plain vLLM, and a store that goes away."""
    import forge

    ours = make_engine(config())
    await ours.start()
    await Weights("policy", rank=0, world_size=1).publish(weights(1), version=1)
    await ours.update_weights("latest", "keep")
    await forge.shutdown()
    error = ""
    try:
        await ours.update_weights("latest", "keep")
    except Exception as raised:  # noqa: BLE001 - the test judges it
        error = type(raised).__name__
    (made,) = await ours.generate(request(sampling=Sampling(temperature=0.0, max_tokens=5, ignore_eos=True)))
    say(trap="no store", error=error, token_ids=made.token_ids, version=ours.version)
    before = {process.pid for process in multiprocessing.active_children()}
    plain = await asyncio.to_thread(start_plain)
    theirs = [process.pid for process in multiprocessing.active_children() if process.pid not in before]
    say(trap="orphans", ours=list(ours.stats().more["pids"]), theirs=theirs)
    await asyncio.Event().wait()
    plain.shutdown()


def start_plain() -> Any:
    with engine_environment("cpu"):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        backend = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        arguments = AsyncEngineArgs(model=str(tiny().folder), distributed_executor_backend=backend, **PLAIN)
        return AsyncLLM.from_engine_args(arguments)


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    hide_broken()
    tied_head()
    seeded_pieces()
    expand()
    asyncio.run(orphans())
