"""Values by key: tensors, DTensors, nested dicts of them, and small Python objects."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.errors import StoreError
from forge.runtime.serialization import encode
from forge.store.client import client, in_thread, start, until_done
from forge.store.reader import Reader
from forge.store.records import Acquire, Begin, Lease
from forge.store.targets import Spec, Target, allocate, is_place
from forge.store.verification import Verify, check_verify
from forge.store.writer import Published, Writer, check_dtype

KIND = "object"
COPY_BELOW = 1 << 20
"""Values smaller than this are copied rather than mapped: a mapping keeps a page table and a lease."""
MAX_REST = 16 << 20
"""Bytes of a value, apart from its tensors, that the store takes."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in a structure where a tensor was."""

    name: str


def take_apart(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[Any, dict[str, Any]]:
    """Return the structure of `value` with a `Leaf` for everything that `is_leaf`, and those by name.

    Looks into dicts, lists and tuples. A leaf's name is the way to it, with dots: `{"a": [x]}` has `a.0`. The value
    itself, if it is a leaf, is named with the empty string.
    """
    leaves: dict[str, Any] = {}

    def walk(node: Any, path: str) -> Any:
        if is_leaf(node):
            if path in leaves:
                raise StoreError(
                    f"two tensors of the value have the name {path!r}",
                    path=path,
                    value=path,
                    rule="the dotted path of each tensor is unique",
                    repair="rename one of the keys",
                )
            leaves[path] = node
            return Leaf(path)
        if isinstance(node, Mapping):
            items = {key: walk(child, f"{path}.{key}" if path else str(key)) for key, child in node.items()}
            return items if type(node) is dict else _same_kind(node, items)
        if type(node) in (list, tuple):
            return type(node)(walk(child, f"{path}.{i}" if path else str(i)) for i, child in enumerate(node))
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            fields = zip(node._fields, node, strict=True)
            return type(node)(*(walk(child, f"{path}.{name}" if path else name) for name, child in fields))
        return node

    return walk(value, ""), leaves


def _same_kind(node: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Keep an OrderedDict one; other mappings, such as a module's state dict with hooks, come back as dicts."""
    from collections import OrderedDict

    return OrderedDict(items) if type(node) is OrderedDict else items


def put_together(structure: Any, leaf: Callable[[str], Any]) -> Any:
    """Rebuild the value: `leaf(name)` gives what belongs in each tensor's place."""
    if isinstance(structure, Leaf):
        return leaf(structure.name)
    if isinstance(structure, Mapping):
        pairs = {key: put_together(child, leaf) for key, child in structure.items()}
        return _same_kind(structure, pairs)
    if type(structure) in (list, tuple):
        return type(structure)(put_together(child, leaf) for child in structure)
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(put_together(child, leaf) for child in structure))
    return structure


def write_structure(key: str, structure: Any) -> bytes:
    """Return a structure as bytes, to be kept by the registry."""
    try:
        data = encode(structure)
    except Exception as error:
        raise StoreError(
            f"a part of the value of {key!r} that is not a tensor cannot be pickled: {error}",
            path=key,
            value=type(error).__name__,
            rule="values are tensors, nested dicts, lists and tuples of them, and small picklable objects",
            repair="leave out what cannot be pickled",
        ) from error
    if len(data) > MAX_REST:
        raise StoreError(
            f"the value of {key!r} is too large without its tensors",
            path=key,
            value=f"{len(data)} bytes",
            rule=f"at most {MAX_REST} bytes of objects that are not tensors",
            repair="put large data as tensors (bytes as uint8)",
        )
    return data


async def put(key: str, value: Any, *, dtype: torch.dtype | None = None) -> Published:
    """Store a value under a key, in place of what was there. Readers see the old value or the new one, never both.

    A value is a tensor, a DTensor, a nested dict, list or tuple of them, or a small picklable object. A DTensor is put
    by every rank of its mesh; the value appears when all have. Cancelled while it waits for them, it is given up, and
    theirs raise. `dtype` converts floating-point tensors on the way.
    """
    check_key(key)
    check_dtype("put(dtype=)", dtype)
    structure, leaves = take_apart(value, lambda node: isinstance(node, Tensor))
    rank, world_size, group = participants(leaves)
    extra = write_structure(key, structure)
    request = Begin(key, KIND, None, rank, world_size, keep=1, group=group)

    writer = Writer(client(), on="host")
    ready = writer.record_stream(leaves)

    def write() -> Published:
        began = time.perf_counter()
        try:
            staged = writer.stage(request, leaves, dtype=dtype, ready=ready)
            return writer.commit(staged, snapshot_s=time.perf_counter() - began, extra=extra)
        finally:
            writer.close()

    if world_size == 1:
        return await in_thread(write)
    # on a thread of its own: it waits for other ranks, who may wait for something else that is done here
    return await until_done(start(writer.snapshots, write), hurry=writer.withdraw)


def participants(leaves: Mapping[str, Tensor]) -> tuple[int, int, str]:
    """Return which of how many ranks this is that put a value: those of the device mesh, or of all meshes together, of
    its DTensors. And which ranks these are, for those of another mesh may put the same key at the same time."""
    meshes = {tensor.device_mesh for tensor in leaves.values() if hasattr(tensor, "device_mesh")}
    if not meshes:
        return 0, 1, ""
    me = torch.distributed.get_rank()
    if len(meshes) > 1:
        return me, torch.distributed.get_world_size(), "all"
    ranks = sorted(int(rank) for rank in next(iter(meshes)).mesh.flatten().tolist())
    if me not in ranks:
        raise StoreError(
            "this rank is not in the device mesh of the value",
            value=me,
            rule=f"one of {ranks}",
            repair="put it from the ranks of its mesh only",
        )
    return ranks.index(me), len(ranks), str(ranks)


async def get(
    key: str,
    into: Any = None,
    *,
    spec: Spec | Mapping[str, Spec] | None = None,
    verify: Verify = "cheap",
    cast: bool = False,
    wait_s: float = 0.0,
) -> Any:
    """Return what is stored under a key.

    With `into` (a tensor, a DTensor, an `At`, or a dict of them) what each wants is copied there, and `into` is
    returned. With `spec` (a `Region`, a `Chunk` or a `Placed`, or a dict of them by name) only that part is fetched,
    into new tensors. Otherwise the value as it was put: large tensors are views of the shared memory where it is on
    this host, yours to change without anybody seeing it.
    """
    check_key(key)
    check_verify("get(verify=)", verify)
    if into is not None and spec is not None:
        raise StoreError(
            "`into` already names the part",
            path=f"get({key!r}, into, spec=)",
            value=spec,
            rule="`into` or `spec`, not both",
            repair="get(key, At(tensor, Chunk(dim=0, index=rank, count=world_size)))",
        )
    places = None if into is None else _places("get(into=)", into)
    here = client()
    lease = await here.acquire(Acquire(key, KIND, None), wait_s=wait_s)

    def read() -> Any:
        reader = Reader(here)
        if places is not None:
            reader.fill(lease, places, verify=verify, strict=False, cast=cast)
            return into
        try:
            structure = pickle.loads(lease.version.extra)
        except BaseException:
            here.release(lease.id)
            raise
        if spec is not None:
            tensors = _parts(reader, lease, spec, verify=verify)
        else:
            tensors = reader.views(lease, verify=verify, copy_below=COPY_BELOW).tensors
        return put_together(structure, tensors.__getitem__)

    return await in_thread(read)


def _places(path: str, into: Any) -> dict[str, Any]:
    """Return the memory in `into`, by name."""
    _, places = take_apart(into, is_place)
    if not places and not (isinstance(into, Mapping) and not into):
        raise StoreError(
            "there is no memory to fill",
            path=path,
            value=type(into).__name__,
            rule="a tensor, a DTensor, an At, or a dict, list or tuple of them",
            repair="leave it out to get new tensors",
        )
    return places


def _parts(reader: Reader, lease: Lease, spec: Spec | Mapping[str, Spec], *, verify: Verify) -> dict[str, Tensor]:
    """Fetch the wanted parts of a value into new tensors; tensors that `spec` does not name come whole."""
    try:
        known = reader.catalog(lease)
        chosen = dict(spec) if isinstance(spec, Mapping) else dict.fromkeys(known.entries, spec)
        check_spec(lease.version.key, chosen, known.entries)
        tensors: dict[str, Tensor] = {}
        targets: list[Target] = []
        for name, entry in known.entries.items():
            tensors[name], target = allocate(name, chosen.get(name), entry.shape, entry.dtype)
            targets.append(target)
        reader.fill_targets(lease, known, targets, verify=verify)
    finally:
        reader.client.release(lease.id)
    return tensors


def check_spec(key: str, spec: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    unknown = sorted(set(spec) - set(entries))
    if unknown:
        raise StoreError(
            f"the value of {key!r} has no tensor {unknown[0]!r}",
            path=f"get({key!r}, spec=)",
            value=unknown,
            rule=f"one of {sorted(entries)[:8]}",
            repair="name tensors by their dotted paths",
        )
    for name, part in spec.items():
        if not isinstance(part, Spec):
            raise StoreError(
                f"{name!r} cannot be read with a {type(part).__name__}",
                path=f"get({key!r}, spec=)",
                value=part,
                rule="a Region, a Chunk or a Placed, or a dict of them by name",
                repair="spec=Chunk(dim=0, index=rank, count=world_size)",
            )


async def put_state_dict(key: str, state_dict: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> Published:
    """Store a state dict; the same as `put`, for those who look for the name."""
    if not isinstance(state_dict, Mapping):
        raise StoreError(
            "a state dict is a dict",
            path=f"put_state_dict({key!r})",
            value=type(state_dict).__name__,
            rule="a dict from names to tensors",
            repair="put_state_dict(key, model.state_dict())",
        )
    return await put(key, dict(state_dict), dtype=dtype)


async def get_state_dict(
    key: str,
    into: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    verify: Verify = "cheap",
    cast: bool = False,
    wait_s: float = 0.0,
) -> Any:
    """Get a state dict, into memory or new; with `strict` its names and those of `into` must be the same."""
    if into is None:
        return await get(key, verify=verify, wait_s=wait_s)
    check_key(key)
    check_verify("get_state_dict(verify=)", verify)
    places = _places("get_state_dict(into=)", into)
    here = client()
    lease = await here.acquire(Acquire(key, KIND, None), wait_s=wait_s)
    await in_thread(Reader(here).fill, lease, places, verify=verify, strict=strict, cast=cast)
    return into


async def keys(prefix: str = "") -> list[str]:
    """Return the keys that there are, sorted; with a prefix, those that begin with it."""
    if not isinstance(prefix, str):
        raise StoreError(
            "a prefix is a string", path="keys(prefix)", value=prefix, rule="a string", repair='keys("batch/")'
        )
    found: list[str] = await client().line.call_async("keys", (KIND, prefix))
    return found


async def exists(key: str) -> bool:
    """Return whether there is a value under this key."""
    check_key(key)
    return bool(await client().line.call_async("exists", (KIND, key)))


async def delete(key: str | None = None, *, prefix: str | None = None) -> int:
    """Forget a key, or every key that begins with a prefix; a key that ends with `/` is a prefix too. How many there
    were: 0 if there was none. A reader of the value continues to read it."""
    if (key is None) == (prefix is None):
        raise StoreError(
            "say what to delete",
            path="delete(key, prefix=)",
            value=(key, prefix),
            rule="a key or a prefix, not both",
            repair='delete("batch/1"), or delete(prefix="batch/")',
        )
    if prefix is None:
        check_key(key)
        prefix = key if str(key).endswith("/") else None
    if prefix is not None:
        names = await keys(prefix)
    else:
        names = [str(key)]
    count: int = await client().line.call_async("delete", (KIND, names))
    return count


def check_key(key: object) -> None:
    if not isinstance(key, str) or not key:
        raise StoreError("a key is a string", path="key", value=key, rule="a non-empty string", repair='"batch/1"')
