"""TRL's `GRPOTrainer` on one GPU, as a peer for `grpo_gpu.py` and `context_gpu.py`. It runs in TRL's environment and
imports nothing of ours but the plan, which needs the standard library alone.

    python gpu_trl.py train SIDE PLAN.json FOLDER       a few steps of GRPO
    python gpu_trl.py probe LIGER PLAN.json FOLDER      which settings make its training step fastest: no, yes or both
    python gpu_trl.py context LENGTH PLAN.json FOLDER   one training step on one sample of that length

What TRL does by default, and does here: weights, gradients and AdamW's states in float32, computed in bfloat16 by
autocast; gradient checkpointing; logprobs in chunks of the vocabulary; one more forward pass for the ratio of trainer
to sampler (`vllm_importance_sampling_correction`), which the side `trl-vllm-uncorrected` leaves out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.gpu_plan import Plan, do_and_end, length_of, model_folder, prompts_file, say, spread

SIDES: Mapping[str, Mapping[str, Any]] = {
    "trl-vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True},
    "trl-vllm-uncorrected": {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_importance_sampling_correction": False,
    },
    "trl-vllm-awake": {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False},
    "trl-transformers": {"use_vllm": False},
}
PROBED_ROWS = (16, 32)
PROBED_ATTENTION = ("sdpa", "flash_attention_4")
"""Kernels by transformers' names: torch's, and the one that our trainer uses."""


class Parts:
    """Seconds by what they went into. Parts may lie in each other."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self.samples = 0
        self.tokens: list[Any] = []

    def now(self) -> float:
        """The time at which all that was asked of the device is done."""
        if self._is_cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self.now()
        try:
            yield
        finally:
            self.seconds[name] += self.now() - began

    def count(self, inputs: Mapping[str, Any]) -> None:
        """What goes through the model for the loss. Nothing is waited for here."""
        self.samples += inputs["completion_ids"].shape[0]
        self.tokens.append(inputs["completion_mask"].sum())

    def taken(self) -> dict[str, Any]:
        """What was counted since the last time."""
        found = {"samples": self.samples, "tokens": sum(int(each) for each in self.tokens), "parts": dict(self.seconds)}
        self.samples, self.tokens, self.seconds = 0, [], defaultdict(float)
        return found


def as_messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def spread_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward, as TRL calls it."""
    return [spread(ids) for ids in completion_ids]


def dtype_of(plan: Plan) -> str:
    return "bfloat16" if plan.precision == "pure" else "float32"


def config_of(plan: Plan, side: str, output: str) -> Any:
    """TRL's configuration: its defaults, the plan's sizes, and what `--trl KEY=VALUE` says."""
    from trl import GRPOConfig

    is_vllm = bool(SIDES[side]["use_vllm"])
    fixed = {"ignore_eos": True, "min_tokens": plan.max_tokens} if is_vllm else {"min_new_tokens": plan.max_tokens}
    asked: dict[str, Any] = {
        "output_dir": output,
        "use_cpu": plan.device == "cpu",
        "bf16": plan.precision != "float32",
        "gradient_checkpointing": plan.gradient_checkpointing,
        "use_liger_kernel": plan.liger,
        "model_init_kwargs": {"dtype": dtype_of(plan), "attn_implementation": plan.attention},
        "per_device_train_batch_size": plan.rows,
        "gradient_accumulation_steps": plan.num_samples // plan.rows,
        "num_generations": plan.group_size,
        "max_completion_length": plan.max_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "generation_kwargs": fixed,
        "vllm_max_model_length": plan.seq_len,
        "vllm_gpu_memory_utilization": plan.vllm_memory,
        "beta": 0.0,
        "epsilon": 0.2,
        "loss_type": "dapo",
        "num_iterations": 1,
        "max_steps": plan.total_steps,
        "learning_rate": plan.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "dataloader_pin_memory": False,
        "seed": plan.seed,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1_000_000,
        "disable_tqdm": True,
        **SIDES[side],
        **given(plan),
    }
    return GRPOConfig(**asked)


def given(plan: Plan) -> dict[str, Any]:
    """What `--trl KEY=VALUE` says, values as JSON."""
    found = {}
    for word in plan.trl:
        key, _, value = word.partition("=")
        found[key] = json.loads(value)
    return found


def import_attention(name: str) -> None:
    """Import a kernel of attention so that processes that are started later still find Python's own modules.

    FlashAttention 4 appends a folder with a typing.py to the module path.
    """
    if name == "flash_attention_4":
        before = list(sys.path)
        import flash_attn.cute  # noqa: F401

        sys.path[:] = [place for place in sys.path if place in before]


def build(plan: Plan, side: str, *, folder: Path, output: str) -> tuple[Any, Parts]:
    """A trainer that counts where its time goes, and tells when steps end."""
    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    import_attention(plan.attention)
    parts = Parts(plan.device)

    class MeteredTrainer(GRPOTrainer):  # type: ignore[misc]
        is_warm = not plan.warm_tokens

        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            if not self.is_warm:
                self.is_warm = True
                for _ in range(2):
                    full = made_up(plan, rows=plan.rows, length=plan.seq_len)
                    self.accelerator.backward(super().compute_loss(model, full, *rest, **named))
                    model.zero_grad()
            parts.count(inputs)
            return super().compute_loss(model, inputs, *rest, **named)

        def _generate_and_score_completions(self, *args: Any, **named: Any) -> Any:
            with parts.part("rollout"):
                return super()._generate_and_score_completions(*args, **named)

        def _generate_single_turn(self, *args: Any, **named: Any) -> Any:
            with parts.part("generation_and_sync"):
                return super()._generate_single_turn(*args, **named)

        def _get_per_token_logps_and_entropies(self, *args: Any, **named: Any) -> Any:
            import torch

            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(*args, **named)
            with parts.part("scoring"):
                return super()._get_per_token_logps_and_entropies(*args, **named)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_named: Any) -> None:
            tell_step(plan, parts, step=state.global_step)

    model = str(model_folder(folder, plan))
    lines = prompts_file(folder, plan).read_text(encoding="utf-8").splitlines()
    trainer = MeteredTrainer(
        model=model,
        reward_funcs=spread_reward,
        args=config_of(plan, side, output),
        train_dataset=Dataset.from_list([{"prompt": as_messages(json.loads(line)["prompt"])} for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)
    if SIDES[side]["use_vllm"]:
        count_syncs(trainer.vllm_generation, parts)
        if plan.tail or plan.warm_tokens:
            vary_lengths(trainer.vllm_generation.llm, plan)
    return trainer, parts


def vary_lengths(llm: Any, plan: Plan) -> None:
    """Let vLLM give completions the lengths of the plan. TRL asks once a step, for one completion of each prompt in the
    list, which has the prompts of a group one after the other."""
    plain, num_calls = llm.generate, 0

    def generate(prompts: list[Any], sampling_params: Any, **named: Any) -> Any:
        nonlocal num_calls
        varied = []
        for length in lengths_of_step(plan, num_calls, num=len(prompts)):
            own = sampling_params.clone()
            own.max_tokens = own.min_tokens = length
            varied.append(own)
        num_calls += 1
        return plain(prompts, sampling_params=varied, **named)

    llm.generate = generate


def lengths_of_step(plan: Plan, step: int, *, num: int) -> list[int]:
    """Return the lengths of the completions of a step, counted from 0."""
    most = plan.warm_tokens if plan.warm_tokens and step < plan.num_warm else plan.max_tokens
    first = step * plan.num_prompts
    places = (divmod(place, plan.group_size) for place in range(num))
    return [min(most, length_of(plan, first + group, member)) for group, member in places]


def count_syncs(generation: Any, parts: Parts) -> None:
    plain = generation.sync_weights

    def sync_weights() -> None:
        with parts.part("sync"):
            plain()

    generation.sync_weights = sync_weights


def tell_step(plan: Plan, parts: Parts, *, step: int) -> None:
    ended = parts.now()
    say("step", step=step, ended=ended, **parts.taken(), **peaks(plan))


def peaks(plan: Plan) -> dict[str, float]:
    """torch's own peaks in this process, in GiB."""
    import torch

    if plan.device != "cuda":
        return {}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"allocated_gib": allocated / 2**30, "reserved_gib": reserved / 2**30}


def train(plan: Plan, side: str, folder: Path) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as output:
        trainer, _ = build(plan, side, folder=folder, output=output)
        say("started", seconds=time.perf_counter() - began, **versions())
        if not plan.only_start:
            trainer.train()
            say("trainer", log=trainer.state.log_history[-1:], **peaks(plan))


def versions() -> dict[str, str]:
    import torch
    import transformers
    import trl

    return {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}


# ---- Steps on tokens that nobody generated


def made_up(plan: Plan, *, rows: int, length: int) -> dict[str, Any]:
    """What TRL's loss takes, of samples of one length, a third of it prompt."""
    import torch

    device = torch.device(plan.device)
    prompt = max(1, length // 3)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (rows, length), generator=draw).to(device)
    mask = torch.ones_like(ids)
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": torch.linspace(-1.0, 1.0, rows + 1, device=device)[1:],
        "num_items_in_batch": mask[:, prompt:].sum(),
        "importance_sampling_ratio": torch.ones_like(mask[:, prompt:], dtype=torch.float32),
    }


def one_pass(trainer: Any, plan: Plan, *, rows: int, length: int) -> None:
    """Forward and backward through TRL's own loss."""
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, made_up(plan, rows=rows, length=length))
    trainer.accelerator.backward(loss)


def one_step(trainer: Any, plan: Plan, *, rows: int, length: int) -> None:
    one_pass(trainer, plan, rows=rows, length=length)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def opened(plan: Plan, folder: Path, output: str) -> tuple[Any, Parts]:
    """A trainer that takes steps without generating, with its optimizer's states in place."""
    trainer, parts = build(plan, "trl-transformers", folder=folder, output=output)
    if plan.liger:
        apply_liger(trainer)
    if plan.gradient_checkpointing:
        trainer.model.gradient_checkpointing_enable()
    trainer.model.train()
    trainer.create_optimizer()
    one_step(trainer, plan, rows=1, length=64)
    return trainer, parts


def apply_liger(trainer: Any) -> None:
    """Let the model compute with Liger's layers, as `use_liger_kernel` does when training begins."""
    from transformers.integrations.liger import apply_liger_kernel

    kept_out = {"fused_linear_cross_entropy": False}  # TRL has an output layer of its own
    apply_liger_kernel(trainer.model, {**(trainer.args.liger_kernel_config or {}), **kept_out})


def probe(plan: Plan, liger: str, folder: Path) -> None:
    """Time a pass with more and more rows: with each kernel of attention, without and with gradient checkpointing; with
    torch's layers, with Liger's, or first with the one and then with the other.

    What needs more memory than there is, and what this machine lacks, is told and left out. With checkpointing more
    rows fit, but nothing is gained where they are as many as without: only the most rows are tried then.
    """
    with tempfile.TemporaryDirectory() as output:
        trainer, parts = opened(replace(plan, liger=False), folder, output)
        say("started", **versions())
        for has_liger in {"no": (False,), "yes": (True,), "both": (False, True)}[liger]:
            if has_liger:
                apply_liger(trainer)
            for attention in PROBED_ATTENTION:
                _probe_rows(trainer, replace(plan, liger=has_liger), parts, attention)


def _probe_rows(trainer: Any, plan: Plan, parts: Parts, attention: str) -> None:
    asked_for = given(plan).get("gradient_checkpointing")
    for is_checkpointed in (False, True) if asked_for is None else (bool(asked_for),):
        switch = "gradient_checkpointing_enable" if is_checkpointed else "gradient_checkpointing_disable"
        getattr(trainer.model, switch)()
        rows = [each for each in PROBED_ROWS if plan.num_samples % each == 0]
        for num in rows[-1:] if is_checkpointed else rows:
            asked = {"rows": num, "gradient_checkpointing": is_checkpointed}
            if not tried(trainer, plan, parts, {**asked, "liger": plan.liger, "attention": attention}):
                break


def tried(trainer: Any, plan: Plan, parts: Parts, asked: Mapping[str, Any]) -> bool:
    """Time a pass with some settings, tell it, and return whether it could be done."""
    import torch

    try:
        import_attention(asked["attention"])
        trainer.model.set_attn_implementation(asked["attention"])
        seconds = timed(trainer, plan, parts, rows=asked["rows"])
    except Exception as error:  # noqa: BLE001 - a kernel that is not there, or cannot be used, ends nothing
        say("tried", **asked, fits=False, why=repr(error)[:300])
        return False
    finally:
        trainer.optimizer.zero_grad()
        if plan.device == "cuda":
            torch.cuda.empty_cache()
    say("tried", **asked, fits=True, seconds_a_sample=seconds / asked["rows"], **peaks(plan))
    return True


def timed(trainer: Any, plan: Plan, parts: Parts, *, rows: int) -> float:
    """Seconds of a pass, after one that is not counted."""
    import torch

    if plan.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(2):
        began = parts.now()
        one_pass(trainer, plan, rows=rows, length=plan.seq_len)
        taken.append(parts.now() - began)
    return taken[-1]


def context(plan: Plan, length: int, folder: Path) -> None:
    """One step on one sample."""
    import torch

    with tempfile.TemporaryDirectory() as output:
        trainer, parts = opened(plan, folder, output)
        if plan.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        say("started", length=length, **versions())
        began = parts.now()
        try:
            one_step(trainer, plan, rows=1, length=length)
        except torch.OutOfMemoryError as error:
            say("full", length=length, what=str(error).splitlines()[0][:300])
            return
        say("trained", length=length, seconds=parts.now() - began, **peaks(plan))


def work(what: str, word: str, plan: Plan, folder: Path) -> None:
    if plan.device == "cpu":
        import torch

        torch.set_num_threads(1)
    if what == "train":
        train(plan, word, folder)
    elif what == "probe":
        probe(plan, word, folder)
    else:
        context(plan, int(word), folder)


def main() -> None:
    what, word, plan_file, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    do_and_end(lambda: work(what, word, Plan.read(plan_file), folder))


if __name__ == "__main__":
    main()
