"""What a buffer holds and goes on to give, as plain numpy arrays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase

from engram.data import ReplayBufferEnsemble, TensorDictReplayBuffer

Arrays = dict[str, np.ndarray]
BATCHES = 6


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Every leaf of a batch or an item by a name that says where it was."""
    if isinstance(value, NonTensorData):
        yield f"{name}.constant", np.array(str(value.data))
    elif isinstance(value, TensorDictBase | dict):
        yield f"{name}.kind", np.array(type(value).__name__)
        for key in sorted(value.keys(), key=str):
            yield from leaves(value[key] if isinstance(value, dict) else value.get(key), f"{name}.{key}")
    elif isinstance(value, list | tuple):
        yield f"{name}.kind", np.array(type(value).__name__)
        for i, one in enumerate(value):
            yield from leaves(one, f"{name}.{i}")
    elif isinstance(value, torch.Tensor):
        yield name, (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()
    elif isinstance(value, bytes):
        yield f"{name}.bytes", np.frombuffer(value, np.uint8)
    elif isinstance(value, np.ndarray | np.generic):
        yield f"{name}.numpy", np.asarray(value)
    else:
        yield f"{name}.{type(value).__name__}", np.array(str(value) if value is None or type(value) is int else value)


def in_a_row(parts: list[Any], name: str) -> Arrays:
    """Several batches, each leaf in one array."""
    found: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for leaf, array in leaves(part, name):
            found.setdefault(leaf, []).append(array)
    made = {leaf: np.concatenate([array.reshape(-1) for array in arrays]) for leaf, arrays in found.items()}
    shapes = {
        f"{leaf} shape": np.array(sorted({array.shape for array in arrays})[-1]) for leaf, arrays in found.items()
    }
    return made | {leaf: shape for leaf, shape in shapes.items() if len(shape) > 1}


def held(rb: Any, name: str) -> Arrays:
    """Rows as they are stored, length, cursor, write count."""
    storages = getattr(rb.storage, "storages", None) or [rb.storage]
    made: Arrays = {f"{name} counts": np.array([len(rb), rb.write_count, *np.ravel(rb.writer._cursor)])}
    for i, storage in enumerate(storages):
        if storage.initialized and len(storage):
            made |= in_a_row([storage.get(slice(None))], f"{name} {i}")
        states = storage.lanes.states() if storage.initialized else []
        # A seam at the end cuts nothing yet: a twin has one where nobody here would write next.
        seams = [[seam for seam in s["seams"] if seam < s["published"]] for s in states]
        lanes = [
            [max(s["base"], s["first"]), s["published"], s["origin"], *at] for s, at in zip(states, seams, strict=True)
        ]
        made[f"{name} {i} lanes"] = np.array([x for lane in lanes for x in (len(lane), *lane)], np.uint64)
    return made


def observed(rb: Any, batch_size: int | None, more: Any = None) -> Arrays:
    """Everything that must be as it was: what is held, the next batches, and both again after further writes."""
    made = held(rb, "held")
    torch.manual_seed(11)
    if batch_size is not None:
        made |= drawn(rb, batch_size, "drawn")
    if more is not None:
        more(rb)
        made |= held(rb, "held later")
        if batch_size is not None:
            made |= drawn(rb, batch_size, "drawn later")
    return made


def drawn(rb: Any, batch_size: int, name: str) -> Arrays:
    batches, infos = [], []
    for _ in range(BATCHES):
        batch, info = rb.sample(batch_size, return_info=True)
        batches.append(as_recorded(rb, batch))
        tensors = {str(key): value for key, value in info.items() if isinstance(value, torch.Tensor | tuple)}
        tensors.pop(str(("next", "terminated")), None)  # which samplers of slices did not say when the files were made
        infos.append(tensors)
    return in_a_row(batches, name) | in_a_row(infos, f"{name} info")


def as_recorded(rb: Any, batch: Any) -> Any:
    """A batch in the form of the recorded ones: an ensemble's index was flat, and of TensorDict buffers only."""
    if not isinstance(rb, ReplayBufferEnsemble) or not isinstance(batch, TensorDictBase):
        return batch
    index, batch = batch["index"], batch.exclude("index")
    tensordicts = all(isinstance(member, TensorDictReplayBuffer) for member in rb._members)
    return batch.update({key: index[key] for key in ("index", "buffer_ids")}) if tensordicts else batch


def write(path: Path, arrays: Arrays) -> None:
    """One member for all bytes, one for what they are: a member for each array would be ten times as large."""
    index = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    content = b"".join(array.tobytes() for array in arrays.values())
    np.savez_compressed(
        path, index=np.frombuffer(json.dumps(index).encode(), np.uint8), content=np.frombuffer(content, np.uint8)
    )


def read(path: Path) -> Arrays:
    """What `write` wrote."""
    with np.load(path, allow_pickle=False) as file:
        index, content = json.loads(file["index"].tobytes()), file["content"].tobytes()
    arrays, at = {}, 0
    for name, dtype, shape in index:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(content, dtype, count, at).reshape(shape) if count else np.empty(shape, dtype)
        at += arrays[name].nbytes
    return arrays


def unlike(found: Arrays, expected: Arrays) -> list[str]:
    """Names under which two observations differ; floats, which powers and sums were taken of, to 1 in a million."""
    said = sorted(found.keys() ^ expected.keys())
    for name in found.keys() & expected.keys():
        one, other = found[name], expected[name]
        exact = one.dtype.kind != "f" or name.startswith("held")
        same = one.tobytes() == other.tobytes() if exact else np.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True)
        if one.dtype != other.dtype or one.shape != other.shape or not same:
            said.append(name)
    return said
