"""The law for ensembles: several buffers that are saved as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engram.data import (
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from engram.envs.transforms import MultiStepTransform, RewardSum, VecNorm
from law.combos import CAPACITY, STORAGES
from law.own_parts import OwnSamplerWithState
from law.world import difference, frozen, settled, steps

STEPS = [
    "extend", "sample", "sample", "update", "iterate", "extend", "sample", "alone", "sample", "extend", "update",
    "sample", "settings", "sample", "empty_one", "extend", "iterate", "sample", "extend", "sample", "update", "sample",
]  # fmt: skip
WAYS = ["whole", "incremental", "background", "in memory"]


class Members(NamedTuple):
    """What an ensemble is made of: `make(folder, generator)` gives its members."""

    storages: tuple[str, ...] = ("memory", "memory")
    samplers: tuple[Callable[[], Any], ...] = (RandomSampler, RandomSampler)
    transforms: tuple[Callable[[], Any] | None, ...] = (None, None)
    kind: Any = TensorDictReplayBuffer
    best: bool = False  # the first member keeps the best
    own_generators: bool = False  # the members', and none of the ensemble
    prefetch: int = 0
    limited: bool = False  # the first member keeps a ratio
    settings: dict[str, Any] = {}

    def make(self, folder: Path, seed: int) -> ReplayBufferEnsemble:
        members = []
        for i, (storage, sampler, transform) in enumerate(
            zip(self.storages, self.samplers, self.transforms, strict=True)
        ):
            numbers = (path for k in itertools.count() if not (path := folder / f"member-{k}").exists())
            made = STORAGES[storage].make(CAPACITY, lambda found=numbers: next(found))  # type: ignore[misc]
            parts: dict[str, Any] = (
                {"generator": torch.Generator().manual_seed(seed + i)} if self.own_generators else {}
            )
            if self.best and i == 0:
                parts["writer"] = TensorDictMaxValueWriter()
            if self.limited and i == 0:
                parts["rate_limiter"] = SampleToInsertRatio(0.5, 8, ahead=8, behind=12)
            members.append(
                self.kind(
                    storage=made, sampler=sampler(), transform=None if transform is None else transform(),
                    batch_size=4, track_generations=True, **parts,
                )
            )  # fmt: skip
        generator = None if self.own_generators else torch.Generator().manual_seed(seed)
        common = VecNorm(in_keys=["observation"], out_keys=["normed"])
        common.learn(steps(0, 9, 0))
        return ReplayBufferEnsemble(
            *members, generator=generator, prefetch=self.prefetch, transform=common, batch_size=6, **self.settings
        )


ENSEMBLES = {
    "two alike": Members(),
    "p": Members(settings={"p": [0.8, 0.2], "num_buffer_sampled": 3}),
    "all of them, epochs": Members(
        samplers=(SamplerWithoutReplacement, lambda: SliceSamplerWithoutReplacement(slice_len=3)),
        settings={"sample_from_all": True},
    ),
    "priorities": Members(
        samplers=(lambda: PrioritizedSampler(None, 0.7, 0.5), lambda: PrioritizedSampler(None, 0.9, 0.2))
    ),
    "transforms": Members(
        transforms=(lambda: MultiStepTransform(3, 0.9), lambda: VecNorm(in_keys=["observation"])), best=True
    ),
    "a list and a file": Members(("list", "named"), transforms=(None, lambda: VecNorm(in_keys=["observation"]))),
    "plain, own samplers": Members(
        samplers=(OwnSamplerWithState, SamplerWithoutReplacement), kind=ReplayBuffer, transforms=(RewardSum, None)
    ),
    "members with generators": Members(own_generators=True, samplers=(RandomSampler, SamplerWithoutReplacement)),
    "one keeps a ratio": Members(limited=True, settings={"num_buffer_sampled": 3}),
    "ahead": Members(prefetch=3, samplers=(SamplerWithoutReplacement, lambda: PrioritizedSampler(None, 0.7, 0.5))),
    "ahead, members with generators": Members(
        prefetch=3, own_generators=True, samplers=(SamplerWithoutReplacement, OwnSamplerWithState)
    ),
}


class EnsembleWorld:
    """An ensemble and its caller."""

    def __init__(self, members: Members, folder: Path, seed: int = 1) -> None:
        folder.mkdir(parents=True)
        self.limited = members.limited
        self.rb = members.make(folder, seed)
        self.time, self.info = 0, None

    def step(self, name: str, number: int) -> Any:
        torch.default_generator.manual_seed(1000 + number)
        try:
            with settled():
                said = getattr(self, name)()
        except (RuntimeError, ValueError, KeyError, IndexError, TypeError, TimeoutError) as error:
            said = (type(error).__name__, str(error))
        return frozen(said)

    def extend(self) -> Any:
        self.time += 9
        each = [steps(self.time + 70 * i, 9 + 4 * i, 0) for i in range(len(self.rb))]
        # The first member comes last: where it would wait for draws, there is a TimeoutError.
        at_once = {"timeout": 0} if self.limited else {}
        return [rb.extend(data, **at_once) for rb, data in zip(self._members()[::-1], each[::-1], strict=True)]

    def _members(self) -> list[Any]:
        return [self.rb[i] for i in range(len(self.rb))]

    def check_batch(self) -> None:
        if self.limited and not self.rb.can_sample():
            raise IndexError("no batch can be drawn")

    def sample(self) -> Any:
        self.check_batch()
        batch, self.info = self.rb.sample(return_info=True)
        return batch, self.info

    def alone(self) -> Any:
        """A member draws by itself."""
        return self.rb[1].sample()

    def iterate(self) -> Any:
        self.check_batch()
        return list(itertools.islice(self.rb, 1 if self.limited else 2))

    def update(self) -> Any:
        if self.info is None:
            raise IndexError("nothing was drawn")
        n = self.info["buffer_ids"].numel()
        return self.rb.update_priority(self.info, torch.linspace(0.2, 4.0, n), self.info.get("generation"))

    def settings(self) -> Any:
        if self.rb.sampler.p is not None:
            self.rb.sampler.p = [0.3, 0.7]

    def empty_one(self) -> Any:
        return self.rb[0].empty()

    def state(self) -> Any:
        saved = self.rb.state_dict()
        for member in saved["storage"]["members"]:
            for lane in member.get("counters", {}).get("lanes", []):
                lane["seams"] = [seam for seam in lane.get("seams", []) if seam > lane["base"]]
        generators = [rb.generator.get_state() for rb in self._members() if rb.generator is not None]
        return frozen({"written": self.rb.write_count, "saved": saved, "generators": generators})


def hold(members: Members, way: str, folder: Path, every: int = 2) -> None:
    """AssertionError where the law is broken."""
    world = EnsembleWorld(members, folder / "original")
    said, saves, states = [], [], {}
    points = range(1, len(STEPS), max(every, 3 if members.prefetch else 1))
    path, finish = folder / "saved", None
    for k, name in enumerate(STEPS):
        said.append(world.step(name, k))
        if k in points:
            states[k] = world.state()
            if finish is not None:
                finish.result()
            if way == "in memory":
                load = _from_memory(world.rb.state_dict())
            else:
                to = path if way != "whole" else folder / f"saved-{k}"
                handle = world.rb.dumps(to, blocking=way != "background", keep_last=99)
                finish = handle if way == "background" else None
                load = _from_disk(to, f"g-{len(saves) + 1 if way != 'whole' else 1:06d}")
            saves.append((k, world.time, world.info, load))
    if finish is not None:
        finish.result()
    for nth, (k, time, info, load) in enumerate(saves):
        twin = EnsembleWorld(members, folder / f"twin-{k}", seed=50)
        if nth % 2:
            for j, name in enumerate(["extend", "extend", "extend", "sample", "update", "iterate"]):
                twin.step(name, 500 + j)
        load(twin.rb)
        twin.time, twin.info = time, info
        where = f"{way}: saved after step {k} ({STEPS[k]}), "
        _same(states[k], twin.state(), f"{where}the state")
        for j in range(k + 1, len(STEPS)):
            _same(said[j], twin.step(STEPS[j], j), f"{where}step {j} ({STEPS[j]})")
            if j in points and members.prefetch:
                twin.state()


def _from_memory(state: Any) -> Callable[[Any], None]:
    return lambda rb: rb.load_state_dict(state)


def _from_disk(path: Path, name: str) -> Callable[[Any], None]:
    return lambda rb: rb.loads(path, snapshot=name)


def _same(mine: Any, its: Any, where: str) -> None:
    found = difference(mine, its)
    assert found is None, f"{where} differs at {found}"
