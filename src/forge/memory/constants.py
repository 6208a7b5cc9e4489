"""The numbers that are measured and not derived, all in one place, so that they can be measured again.

`benchmarks/memory_plan.py` compares what is predicted with them to what a GPU shows.
"""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30
MIB: Final = 1 << 20

CARD_RESERVE: Final = 0.015
"""The part of a GPU's nominal memory that no process gets: the driver, and tables for error correction."""

START_TOLERANCE: Final = 0.05
"""By how much a prediction may exceed a GPU before a run is refused at its start; below it, there is a warning. Less
than this the prediction cannot promise, and a run that would have gone well must not be stopped."""

CUDA_CONTEXT: Final = 512 * MIB
"""A process on a GPU: the driver's context, the code of kernels, cuBLAS's workspace."""

NCCL_BUFFERS: Final = 256 * MIB
"""The communicators of a rank that speaks with other GPUs."""

ALLOCATOR_SLACK: Final = 0.025
"""What torch's allocator holds beyond what tensors take at a peak, as a part of what came and went: activations and
temporaries. Weights and states, which stay, leave no gaps. Blocks as large as an embedding are counted apart
(`forge.memory.trainer.idle_bytes`): they are what makes the gaps of short rows relatively large. Both rest on
Qwen3-1.7B on an H200, with rows of 1,536 to 17,408 tokens."""

COMPILED_SLACK: Final = 0.12
"""The same for compiled layers, whose temporaries are larger and fewer; rests on rows of 8,704 to 26,112 tokens."""

VLLM_OVERHEAD: Final = 1536 * MIB
"""What vLLM holds besides weights and cache where the size of its cache was given: activations of a prefill, recorded
steps, its sampler."""

VLLM_ASLEEP: Final = 1024 * MIB
"""What vLLM still holds on the GPU while it sleeps: its context and recorded steps."""

VLLM_SHARE: Final = 0.8
"""vLLM's part of a GPU where nothing else is said, as in `forge.generator.vllm.arguments`."""

HOST_PROCESS: Final = 700 * MIB
"""The host memory of a process that has loaded torch."""

HOST_GPU_PROCESS: Final = 2560 * MIB
"""The same with CUDA's libraries."""

HEAD_CHUNK_GPU: Final = 1024
HEAD_CHUNK_CPU: Final = 256
"""Tokens of a chunk of the output layer where nothing is said, as in `forge.losses.head`."""

PAGE_TOKENS: Final = 16
"""Tokens of one page of keys and values, as in `forge.kernels.paged`."""
