"""What a process uses: its CPU time, its memory, its children; and GPUs, by a stand-in for the driver's library."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge.observe.nvml import open_look
from forge.observe.usage import measure_use

HOLDER = """
import sys, time
block = bytearray({size})
for place in range(0, len(block), 4096):
    block[place] = 1
until = time.process_time() + 0.3
while time.process_time() < until:
    pass
print("ready", flush=True)
sys.stdin.read()
"""
SIZE = 64 << 20


def holder() -> subprocess.Popen[str]:
    """A process that has spent CPU time and holds memory, until its input closes."""
    command = [sys.executable, "-c", HOLDER.format(size=SIZE)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_own_memory_and_cpu_time_are_counted() -> None:
    before = measure_use()
    assert before is not None
    block = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, SIZE)  # anonymous shared memory
    for place in range(0, SIZE, mmap.PAGESIZE):
        block[place] = shared[place] = 1
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    after = measure_use()
    assert after is not None
    assert after.memory - before.memory > 0.9 * SIZE
    assert after.shared - before.shared > 0.9 * SIZE
    assert after.cpu_s - before.cpu_s > 0.19
    assert (after.gpu_memory, after.devices) == (None, ())


def test_children_are_counted_unless_they_answer_for_themselves() -> None:
    before = measure_use()
    child = holder()
    try:
        after, without = measure_use(), measure_use(except_for={child.pid})
    finally:
        child.communicate()
    assert before is not None
    assert after is not None
    assert without is not None
    assert after.memory - without.memory > 0.9 * SIZE
    assert after.cpu_s - without.cpu_s > 0.25
    ended = measure_use()
    assert ended is not None
    assert ended.memory < after.memory - 0.9 * SIZE
    assert ended.cpu_s >= after.cpu_s - 0.02, "what a child has used stays used"


NVML = """
#include <string.h>
typedef unsigned long long u64;
typedef struct { u64 time_us; union { double d; unsigned int u; u64 ull; } value; } sample;
typedef struct { unsigned long long total, free, used; } memory;
static int device = 7, looks = 0;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **found) {
  if (strcmp(uuid, "GPU-abc")) return 6;
  *found = &device;
  return 0;
}
int nvmlDeviceGetIndex(void *given, unsigned int *index) { *index = *(int *)given; return 0; }
int nvmlDeviceGetMemoryInfo(void *given, memory *found) {
  found->total = 100; found->free = 40; found->used = 60;
  return given == &device ? 0 : 1;
}
int nvmlDeviceGetSamples(void *given, int type, u64 since, int *kind, unsigned int *count, sample *found) {
  if (given != &device || type != 1 || *count < 2) return 2;
  if (since >= 2000) return 6;
  *kind = 1; *count = 2; looks += 1;
  found[0].time_us = since + 500; found[0].value.ull = ~0ULL; found[0].value.u = 20;
  found[1].time_us = since + 1000; found[1].value.ull = 0; found[1].value.u = 80;
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_gpu_is_looked_at_by_the_drivers_library(tmp_path: Path) -> None:
    source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
    source.write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    look = open_look(str(library))
    assert look("abc") == (7, 60, 0.5)
    assert look("GPU-abc") == (7, 60, 0.5)  # the same by its whole name, since a time of its own
    assert look("abc") == (7, 60, 0.5)
    assert look("abc") == (7, 60, None), "the driver has nothing new"
    assert look("other") is None


def test_without_the_library_nothing_is_known() -> None:
    assert open_look("libthere-is-none.so")("abc") is None
    assert open_look("libc.so.6")("abc") is None  # another library


def test_a_process_that_ends_meanwhile_is_not_counted() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: it has no memory, and its status says so
    try:
        assert measure_use() is not None
    finally:
        child.wait()
