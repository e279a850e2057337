"""Writes `torchrl.zip`: what TorchRL's `dumps` makes of small buffers, and the rows that TorchRL itself reads back.

Runs where torchrl and h5py are installed (the benchmarks' environment); engram and its tests need neither:

    python tests/data/foreign/make_torchrl.py
"""

import json
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import (
    CompressedListStorage,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    ImmutableDatasetWriter,
    NestedStorageCheckpointer,
    RandomSampler,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)

HERE = Path(tempfile.mkdtemp())
ARCHIVE = Path(__file__).with_name("torchrl.zip")
rows: dict[str, np.ndarray] = {}
facts: dict[str, dict] = {}


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def steps(n, start=0):
    a = torch.arange(start, start + n)
    column, done = a.float()[:, None], (a % 5 == 4)[:, None]
    return TensorDict(
        {
            "obs": torch.stack([a, a + 0.5], -1).float(),
            "action": 100 + a,
            "agent": {"state": a.double()},
            "collector": {"traj_ids": a // 5},
            "next": {
                "obs": torch.stack([a + 1, a + 1.5], -1).float() + 0.25 * done,
                "agent": {"state": a.double() + 1},
                "reward": column,
                "done": done,
                "terminated": done,
                "truncated": torch.zeros(n, 1, dtype=torch.bool),
            },
        },
        [n],
    )


def short(n, start=0):
    return steps(n, start).select("obs", ("next", "done"))


def many(n, mapped=False):
    a, names = torch.arange(n), "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
    made = {name: (a % 2 if name == "bool" else a).to(getattr(torch, name)) for name in names.split()}
    made["pixels"] = (a % 256).to(torch.uint8)[:, None, None].expand(n, 2, 3).clone()
    made |= {"next": {"x": a + 1, "deep": {"er": a * 2}}, "a/b %": a, "é.x": a}
    if not mapped:  # TorchRL maps neither
        made |= {"complex64": torch.complex(a.float(), -a.float()), "nothing": torch.zeros(n, 0)}
    return TensorDict(made, [n])


def plain(value):
    return value.view(torch.int16).numpy() if value.dtype is torch.bfloat16 else value.numpy()


def leaves(data, path=()):
    if isinstance(data, torch.Tensor):
        yield path, data
    elif isinstance(data, (list, tuple)):
        for i, value in enumerate(data):
            yield from leaves(value, (*path, str(i)))
    else:
        for key, value in data.items():
            if not isinstance(value, (NonTensorData, NonTensorStack, str, list)) or isinstance(data, dict):
                yield from leaves(value, (*path, key))


def spoil(storage, n):
    """Slots that were never written hold what happened to be there: here always the same, and no rows."""
    for _, leaf in leaves(storage._storage):
        left = leaf[n:]
        left.copy_(torch.full_like(left, 1) if left.dtype is torch.bool else torch.full_like(left, 77))


def keep(name, buffer, shown=None, junk=None, **more):
    """Saves a buffer; its rows are those of `shown`, by default of itself."""
    if junk is not None:
        spoil(buffer._storage, junk)
    buffer.dumps(HERE / name)
    shown = buffer if shown is None else shown
    ndim = buffer._storage.ndim
    length = len(shown._storage) // int(np.prod(shown._storage.shape[1:ndim])) if ndim > 1 else len(shown._storage)
    for path, leaf in leaves(shown._storage._storage):
        rows["|".join((name, *path))] = plain(leaf[:length]).copy()
    written = json.loads((HERE / name / "writer" / "metadata.json").read_text()) if more.pop("writer", True) else {}
    facts[name] = {"length": length, **written, **more}


def filled(n, size=10, ndim=1, kind=TensorDictReplayBuffer, data=steps, storage=LazyTensorStorage, form=None, **parts):
    storage = storage(size) if ndim == 1 else storage(size, ndim=ndim)
    buffer = kind(storage=storage, batch_size=3, **parts)
    if form is not None:
        buffer._storage.checkpointer = form()  # a buffer gives its storage another one when it is made
    if n:
        buffer.extend(data(n) if ndim == 1 else torch.stack([data(n), data(n, 1000)]))
    return buffer


def tables():
    for name, n in (("partial", 7), ("full", 10), ("wrapped", 13)):
        keep(f"tensor-{name}", filled(n, data=many), junk=n)
    keep("memmap-wrapped", filled(23, data=lambda n: many(n, mapped=True), storage=LazyMemmapStorage))
    keep("strands-partial", filled(7, 20, 2), junk=7)
    keep("strands-wrapped", filled(13, 20, 2))
    keep("three-dims", filled_3d())
    dataset = ReplayBuffer(storage=TensorStorage(steps(6)), writer=ImmutableDatasetWriter())
    keep("dataset", dataset, writer=False)
    keep("one-tensor", filled(13, kind=ReplayBuffer, data=torch.arange))
    keep("pytree", filled(7, kind=ReplayBuffer, data=tree), junk=7)
    keep("emptied", emptied())
    keep(
        "tensorclass",
        filled(7, kind=ReplayBuffer, data=lambda n: Pair(torch.arange(n), torch.ones(n, 2), batch_size=[n])),
    )
    buffer = filled(7)
    spoil(buffer._storage, 7)
    buffer._storage.dumps(HERE / "storage-alone")


def pairs(n):
    return Pair(torch.arange(n), torch.ones(n, 2), batch_size=[n])


def filled_3d():
    buffer = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3), batch_size=3)
    buffer.extend(torch.stack([torch.stack([steps(5, 100 * i + 10 * j) for j in range(3)]) for i in range(2)]))
    return buffer


def tree(n):
    a = torch.arange(n)
    return {"a": a, "b": [a.float()[:, None], (a * 2,)], "c.d": a, "e": {"1": a}}


def emptied():
    buffer = filled(7)
    buffer.empty()
    spoil(buffer._storage, 0)
    return buffer


def trajectories():
    forms = {"flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer}
    for name, form in forms.items():
        for how, n in (("partial", 7), ("almost", 9), ("full", 10), ("wrapped", 13)):
            for ndim in (1, 2):
                buffer = filled(n, 10 * ndim, ndim, form=form)
                spoil(buffer._storage, n)
                twin = filled(0, 10 * ndim, ndim, form=form)
                saved = HERE / f"{name}-{how}-{ndim}"
                buffer.dumps(saved)
                try:
                    twin.loads(saved)  # TorchRL's own reading of it
                except RuntimeError:  # flat, full, ndim=2: it cannot read what it wrote
                    twin = filled(n, 10 * ndim, ndim, data=flagged)
                shutil.rmtree(saved)
                keep(saved.name, buffer, twin)


def parts():
    for name, n, taken, options in (
        ("epoch-new", 10, 0, {}),
        ("epoch-begun", 10, 1, {}),
        ("epoch-over", 10, 4, {}),
        ("epoch-in-order", 10, 2, {"shuffle": False}),
        ("epoch-drop-last", 10, 2, {"drop_last": True}),
        ("epoch-partial", 7, 1, {}),
        ("epoch-wrapped", 13, 2, {}),
    ):
        torch.manual_seed(0)
        buffer = filled(n, data=short, sampler=SamplerWithoutReplacement(**options))
        spoil(buffer._storage, n)
        drawn = [buffer.sample()["index"].tolist() for _ in range(taken)]
        keep(name, buffer, drawn=drawn)
        facts[name]["then"] = [buffer.sample()["index"].tolist() for _ in range(4)]
    strands = filled(10, 20, 2, data=short, sampler=SamplerWithoutReplacement())
    drawn = [strands.sample()["index"].tolist()]
    keep("epoch-strands", strands, drawn=drawn)
    facts["epoch-strands"]["then"] = [strands.sample()["index"].tolist() for _ in range(4)]
    extended = filled(7, data=short, sampler=SamplerWithoutReplacement())
    extended.sample()
    extended.extend(short(2, 7))
    keep("epoch-extended", extended, junk=9)
    slices = filled(10, data=short, sampler=SliceSamplerWithoutReplacement(slice_len=1, strict_length=False))
    keep("slices-new", slices)
    slices.sample(1)
    keep("slices-begun", slices)
    keep("two-samplers", filled(10, data=short, sampler=SamplerEnsemble(RandomSampler(), RandomSampler())))
    for name, n in (("best", 13), ("best-partial", 7)):
        ranked = filled(n, data=shuffled, writer=TensorDictMaxValueWriter(rank_key=("next", "reward")))
        keep(name, ranked, junk=min(n, 10))
    keep("generator", filled(7, data=short, generator=torch.Generator().manual_seed(3)), junk=7)


def flagged(n, start=0):
    return steps(n, start).update({key: torch.zeros(n, 1).bool() for key in ("done", "terminated", "truncated")})


def shuffled(n):
    return steps(n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]


def others():
    constant, changing = steps(7), steps(7)
    constant.set("name", NonTensorData("cart", [7]))
    changing.set("name", NonTensorStack(*"abcdefg"))
    keep("constant", filled(7, 7, data=lambda n: constant))
    keep("changing", filled(7, 7, data=lambda n: changing))
    compressed = ReplayBuffer(storage=CompressedListStorage(10), batch_size=3)
    compressed.extend([torch.arange(4) + i for i in range(3)])
    compressed.dumps(HERE / "compressed")
    members = [filled(7), filled(8)]
    for member, n in zip(members, (7, 8), strict=True):
        spoil(member._storage, n)
    ReplayBufferEnsemble(*members, batch_size=4).dumps(HERE / "ensemble")
    ahead = filled(7, prefetch=2)
    spoil(ahead._storage, 7)
    ahead.sample()
    keep("prefetched", ahead)
    odd = TensorDict({"shape": torch.arange(3), "a": torch.arange(3)}, [3])
    keep("key-named-shape", filled(3, 3, kind=ReplayBuffer, data=lambda n: odd))


def main():
    warnings.simplefilter("ignore")
    for make in (tables, trajectories, parts, others):
        make()
    np.savez(HERE / "rows.npz", **rows)
    (HERE / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in sorted(file for file in HERE.rglob("*") if file.is_file()):
            archive.writestr(zipfile.ZipInfo(str(file.relative_to(HERE))), file.read_bytes(), zipfile.ZIP_DEFLATED)
    shutil.rmtree(HERE)


if __name__ == "__main__":
    main()
