"""ReplayBufferEnsemble and its parts."""

import contextlib
import itertools
import os
import threading
import time
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from contracts.each import each
from contracts.waiting import NEVER
from engram import Generator, _native
from engram.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
    WriterEnsemble,
)
from engram.data.replay_buffers.buffers.parts import BufferParts
from engram.data.replay_buffers.checkpointers import StorageEnsembleCheckpointer, TensorStorageCheckpointer
from engram.data.replay_buffers.reading import joining, prefetch, reader
from engram.envs import (
    ClipTransform,
    Compose,
    DTypeCastTransform,
    ExcludeTransform,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    SelectTransform,
    SignTransform,
    VecNorm,
)
from engram.errors import CheckpointError, CorruptCheckpointError, StorageError
from engram.testing import chi_square, env_steps, numbers, steps

pytestmark = pytest.mark.usefixtures("lock_order")


def member(start, n, storage=LazyTensorStorage, cls=TensorDictReplayBuffer, **kwargs):
    rb = cls(storage=storage(20), **kwargs)
    rb.extend(steps(start, start + n))
    return rb


def by_priority(**parts):
    return PrioritizedReplayBuffer(0.7, 0.5, **parts)


def tensordicts_by_priority(**parts):
    return TensorDictPrioritizedReplayBuffer(0.7, 0.5, **parts)


def ensemble(*members, **kwargs):
    """Numbers 0 to 9 in the first member, 1000 to 1014 in the second."""
    members = members or (member(0, 10), member(1000, 15))
    return ReplayBufferEnsemble(*members, **{"batch_size": 10, **kwargs})


def check(rb, batch, info):
    """Every row is from the member and the index that info names."""
    found, ids, index = numbers(batch), info["buffer_ids"], info["index"]
    assert ids.shape == index.shape == (len(found), len(found[0])) and ids.dtype == index.dtype == torch.int64
    for row, members, at in zip(found, ids.tolist(), index.tolist(), strict=True):
        assert [int(rb[m][i]["n"]) for m, i in zip(members, at, strict=True)] == row
        assert len(set(members)) == 1


class TestSampling:
    @each("prefetch", [0, 2])
    @each("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
    def test_a_batch_is_members_by_rows_and_info_says_whose(self, storage, prefetch):
        rb = ensemble(member(0, 10, storage), member(1000, 15, storage), prefetch=prefetch)
        seen = set()
        for _ in range(20):
            batch, info = rb.sample(return_info=True)
            assert batch.shape == (2, 5)
            check(rb, batch, info)
            assert all(torch.equal(batch["index", key], info[key]) for key in ("index", "buffer_ids"))
            assert torch.equal(info["generation"], info["index"])
            seen |= set(info["buffer_ids"].flatten().tolist())
        assert seen == {0, 1}

    def test_members_of_different_storages_stack_too(self):
        rb = ensemble(member(0, 10, ListStorage), member(1000, 15), member(2000, 4, LazyMemmapStorage), batch_size=12)
        for _ in range(10):
            check(rb, *rb.sample(return_info=True))

    def test_plain_buffers_add_nothing_but_the_index_to_the_batch(self):
        rb = ensemble(member(0, 10, cls=ReplayBuffer), member(1000, 15, cls=ReplayBuffer))
        batch, info = rb.sample(return_info=True)
        assert set(batch.keys()) == {*steps(0, 1).keys(), "index"}
        check(rb, batch, info)

    def test_from_all_each_member_gives_its_part(self):
        rb = ensemble(sample_from_all=True)
        for _ in range(10):
            assert rb.sample(return_info=True)[1]["buffer_ids"].tolist() == [[0] * 5, [1] * 5]

    @each("p", [None, [1, 3], [0.0, 2.0], torch.tensor([0.9, 0.1])])
    def test_members_are_drawn_by_their_weights(self, p):
        torch.manual_seed(0)
        sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), p=p, num_buffer_sampled=1000)
        ids = [i for _ in range(20) for i in sampler.choose(1000)[0]]
        weights = torch.tensor([1.0, 1.0] if p is None else [float(x) for x in p])
        counts = torch.bincount(torch.tensor(ids), minlength=2)
        assert counts[weights == 0].sum() == 0
        used = weights > 0
        if used.sum() > 1:
            assert chi_square(counts[used], (weights / weights.sum())[used]) > 1e-6

    def test_members_can_be_drawn_more_often_than_there_are(self):
        rb = ensemble(num_buffer_sampled=5)
        batch, info = rb.sample(return_info=True)
        assert batch.shape == (5, 2)
        check(rb, batch, info)

    def test_a_seed_or_the_ensembles_own_generator_reproduces_batches(self):
        rb = ensemble()

        def draw():
            torch.manual_seed(1)
            return [numbers(rb.sample()) for _ in range(5)]

        assert draw() == draw()
        a, b = (ensemble(generator=torch.Generator().manual_seed(3)) for _ in range(2))
        assert [numbers(a.sample()) for _ in range(5)] == [numbers(b.sample()) for _ in range(5)]

    def test_epochs_of_members_go_on_over_their_end(self):
        rb = ensemble(
            member(0, 7, sampler=SamplerWithoutReplacement()), member(1000, 7, sampler=SamplerWithoutReplacement()),
            sample_from_all=True,
        )  # fmt: skip
        drawn = torch.cat([torch.tensor(numbers(rb.sample())) for _ in range(7)], 1)
        for row in drawn:
            for start in range(0, 35, 7):
                assert len(set(row[start : start + 7].tolist())) == 7

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_iterating_ends_with_a_members_epoch(self, prefetch):
        rb = ensemble(
            member(0, 10, sampler=SamplerWithoutReplacement()), member(1000, 20, sampler=SamplerWithoutReplacement()),
            sample_from_all=True, prefetch=prefetch,
        )  # fmt: skip
        assert sum(1 for _ in rb) == 2

    def test_members_with_other_keys_are_stacked_lazily(self):
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        other.extend(steps(1000, 1005).set("more", torch.zeros(5)))
        rb = ensemble(member(0, 10), other, sample_from_all=True)
        batch, info = rb.sample(return_info=True)
        assert isinstance(batch, LazyStackedTensorDict) and "more" in batch[1].keys() and "more" not in batch[0].keys()
        check(rb, batch, info)

    def test_members_with_other_shapes_are_stacked_lazily(self):
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        other.extend(steps(1000, 1005).set("obs", torch.zeros(5, 7)))
        batch = ensemble(member(0, 10), other, sample_from_all=True).sample()
        assert batch[0]["obs"].shape == (5, 3) and batch[1]["obs"].shape == (5, 7)

    def test_tensors_and_dicts_are_stacked(self):
        for data in (torch.arange(6.0), {"x": torch.arange(6.0)}):
            rbs = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
            for one in rbs:
                one.extend(data)
            batch = ReplayBufferEnsemble(*rbs, batch_size=8).sample()
            assert (batch if isinstance(batch, torch.Tensor) else batch["x"]).shape == (2, 4)

    def test_environments_are_members_too(self):
        rbs = [TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2)) for _ in range(2)]
        for k, one in enumerate(rbs):
            one.extend(TensorDict({"x": torch.arange(12.0).reshape(3, 4) + 100 * k}, [3, 4]))
        rb = ReplayBufferEnsemble(*rbs, batch_size=8)
        batch, info = rb.sample(return_info=True)
        assert batch.shape == (2, 4) and info["index"].shape == (2, 4, 2)
        for ids, at, x in zip(info["buffer_ids"], info["index"], batch["x"], strict=True):
            t, e = at.unbind(-1)
            assert torch.equal(x, e * 4.0 + t + 100 * ids)

    def test_slices_are_marked_by_their_member(self):
        data = steps(0, 15).set("next", TensorDict({"done": torch.zeros(15, 1, dtype=torch.bool)}, [15]))
        rbs = [ReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(num_slices=2)) for _ in range(2)]
        for one in rbs:
            one.extend(data)
        batch = ReplayBufferEnsemble(*rbs, batch_size=16).sample()
        assert batch["next", "truncated"][..., 0].nonzero().tolist() == [[k, i] for k in (0, 1) for i in (3, 7)]


class TestTransformsAndCollate:
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_each_members_transform_then_the_common_one(self, prefetch):
        def times(k):
            return lambda batch: batch.set("obs", batch["obs"] * k)

        rb = ensemble(
            member(0, 10, transform=times(10.0)), member(1000, 15), sample_from_all=True, prefetch=prefetch,
            transform=lambda batch: batch.set("sum", batch["obs"].sum(-1)).set("obs", batch["obs"] + 0.25),
        )  # fmt: skip
        batch, info = rb.sample(return_info=True)
        for k, factor in ((0, 10.0), (1, 1.0)):
            stored = rb.storage[k].get(info["index"][k])["obs"]
            assert torch.equal(batch["obs"][k], stored * factor + 0.25)
            assert torch.equal(batch["sum"][k], (stored * factor).sum(-1))

    def test_a_transform_added_to_a_member_later_counts(self):
        rb = ensemble(sample_from_all=True)
        rb[1].append_transform(lambda batch: batch.set("obs", batch["obs"] * 0))
        batch = rb.sample()
        assert not batch["obs"][1].any() and batch["obs"][0].any()

    @each(
        "change",
        [
            lambda b: b.set("obs", b["obs"] + 1),
            lambda b: b.set(("next", "reward"), b["next", "reward"] * 2),
            lambda b: b.set("new", b["n"] * 2).set(("next", "new"), b["n"] + 1),
            lambda b: b.exclude("obs", ("next", "small")),
            lambda b: b.rename_key_("obs", "observation"),
            lambda b: b.set("next", TensorDict({"reward": b["next", "reward"]}, b.batch_size)),
            lambda b: b.set("obs", b["obs"].add_(3)),
            lambda b: b.set("obs", b["obs"].flip(0)).set("n", b["n"].clone()),
            lambda b: TensorDict({"only": b["obs"][:, 0]}, b.batch_size),
            lambda b: b.set("next", b["obs"]),
            lambda b: b.set("obs", TensorDict({"a": b["obs"]}, b.batch_size)),
            lambda b: b.unsqueeze(-1),
            lambda b: b["obs"],
            lambda b: b,
        ],
    )
    @each("cls", [ReplayBuffer, TensorDictReplayBuffer])
    def test_whatever_a_transform_does_the_batch_is_what_stacking_gives(self, change, cls):
        changed = {"times": [change, None], "both": [change, change]}
        for transforms in changed.values():
            rbs = [member(1000 * k, 10, cls=cls, transform=t) for k, t in enumerate(transforms)]
            rb = ReplayBufferEnsemble(*rbs, sample_from_all=True, batch_size=8)
            if not isinstance(change(steps(0, 4)), TensorDict) and transforms[1] is None:
                continue  # a tensor and a TensorDict make no batch
            if change(steps(0, 4)).ndim > 1 and transforms[1] is None:
                continue
            batch, info = rb.sample(return_info=True)
            for k in (0, 1):
                expected = rbs[k].storage.get(info["index"][k])
                if cls is TensorDictReplayBuffer:
                    expected["index"] = info["index"][k]
                expected = expected if transforms[k] is None else change(expected)
                found = batch[k]
                if not isinstance(batch, torch.Tensor):
                    assert torch.equal(batch["index", "index"].reshape(*info["index"].shape, -1)[..., 0], info["index"])
                    found, expected = found.exclude("index"), expected.exclude("index")
                assert isinstance(found, torch.Tensor) or set(found.keys(True)) == set(expected.keys(True))
                assert (found == expected).all()

    @each("classes", [
        (ReplayBuffer, ReplayBuffer), (TensorDictReplayBuffer, ReplayBuffer), (TensorDictReplayBuffer, by_priority),
        (by_priority, tensordicts_by_priority),
    ])  # fmt: skip
    @each("storage", [LazyTensorStorage, ListStorage])
    def test_members_of_every_class_say_index_and_member_at_the_root_of_the_batch(self, classes, storage):
        rb = ensemble(*(member(1000 * k, 10, storage, cls=cls) for k, cls in enumerate(classes)), sample_from_all=True)
        batch, info = rb.sample(return_info=True)
        index = batch["index"]
        assert isinstance(index, TensorDictBase) and index.batch_size == (2, 5)
        for key in ("index", "buffer_ids"):
            assert torch.equal(batch["index", key], info[key]) and index[key].dtype is torch.int64
        assert numbers(batch) == (index["buffer_ids"] * 1000 + index["index"]).tolist()
        batch.clone().reshape(-1).to_tensordict()

    def test_members_of_several_dimensions_say_index_and_member_too(self):
        members = [ReplayBuffer(storage=LazyTensorStorage(60, ndim=ndim)) for ndim in (2, 1)]
        members[0].extend(env_steps(3, 0, 12))
        members[1].extend(steps(0, 12))
        rb = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
        batch, info = rb.sample(return_info=True)
        for k in range(2):
            assert torch.equal(batch["index"][k]["index"], info["index"][k])
            assert batch["index"][k]["buffer_ids"].tolist() == [k] * 4

    def test_a_common_transform_finds_the_index(self):
        rb = ensemble(transform=lambda batch: batch.set("whose", batch["index", "buffer_ids"]))
        batch, info = rb.sample(return_info=True)
        assert torch.equal(batch["whose"], info["buffer_ids"])

    def test_a_collate_function_gets_the_members_batches(self):
        rb = ensemble(collate_fn=lambda batches: torch.cat(batches), sample_from_all=True)
        batch, info = rb.sample(return_info=True)
        whose = zip(info["buffer_ids"].flatten().tolist(), info["index"].flatten().tolist(), strict=True)
        assert batch.shape == (10,) and [int(rb[m][i]["n"]) for m, i in whose] == numbers(batch)

    def test_members_can_be_given_collate_functions(self):
        rb = ensemble(collate_fns=[lambda batch: batch.set("mine", batch["n"] + 1), None], sample_from_all=True)
        batch = rb.sample()
        assert "mine" in batch[0].keys() and "mine" not in batch[1].keys() and "mine" not in rb[0].sample(3).keys()


class TestPriorities:
    def make(self, **kwargs):
        return ensemble(
            *(member(1000 * k, 10, sampler=PrioritizedSampler(20, 1.0, 0.5)) for k in (0, 1)),
            track_generations=True, **kwargs,
        )  # fmt: skip

    @each("how", ["info", "ids", "batch"])
    def test_updates_go_to_the_members_that_the_rows_came_from(self, how):
        rb = self.make(sample_from_all=True)
        batch, info = rb.sample(return_info=True)
        assert torch.equal(batch["priority_weight"], info["priority_weight"])
        given = torch.rand(2, 5) + 1
        if how == "info":
            rb.update_priority(info, given, info["generation"])
        elif how == "ids":
            rb.update_priority(info["index"].flatten(), given.flatten(), buffer_ids=info["buffer_ids"].flatten())
        else:
            rb.update_tensordict_priority(batch.set("td_error", given.unsqueeze(-1)).reshape(-1))
        for k in (0, 1):
            last = dict(zip(info["index"][k].tolist(), given[k].tolist(), strict=True))
            now = rb[k].sampler.priorities(torch.arange(10), storage=rb[k].storage).tolist()
            assert now == pytest.approx([last.get(i, 1.0) for i in range(10)])

    def test_rows_that_are_gone_are_skipped_in_their_member(self):
        rb = self.make(sample_from_all=True)
        _, info = rb.sample(return_info=True)
        rb[1].extend(steps(2000, 2020))
        rb.update_priority(info, torch.full((2, 5), 9.0), info["generation"])
        assert (rb[0].sampler.skipped, rb[1].sampler.skipped) == (0, 5)

    def test_an_index_without_members_is_refused(self):
        rb = self.make()
        _, info = rb.sample(return_info=True)
        with pytest.raises(ValueError, match="buffer_ids"):
            rb.update_priority(info["index"], torch.ones(2, 5))
        with pytest.raises(KeyError, match="td_error"):
            rb.update_tensordict_priority(rb.sample())

    def test_marking_goes_to_the_member(self):
        rb = self.make()
        rb[0].update_priority(torch.tensor([3]), torch.tensor([0.0]))
        rb.mark_update(torch.tensor([3]), buffer_ids=torch.tensor([0]))
        assert float(rb[0].sampler.priorities(torch.tensor([3]), storage=rb[0].storage)) == 1.0


class TestMembers:
    def test_an_index_is_a_member_and_the_length_their_number(self):
        a, b = member(0, 10), member(1000, 15)
        rb = ensemble(a, b)
        assert len(rb) == 2 and rb[0] is a and rb[-1] is b and rb.write_count == 25
        assert numbers(rb[1, 2:4]) == [1002, 1003] and rb.storage[0] is a.storage and len(rb.storage) == 2
        assert rb.sampler[1] is b.sampler and rb.writer[1] is b.writer
        with pytest.raises(IndexError, match="-2 to 1, got 2"):
            rb[2]
        with pytest.raises(IndexError, match="member"):
            rb[:]

    def test_writing_to_the_ensemble_says_to_write_to_a_member(self):
        rb = ensemble()
        for write in (
            lambda: rb.extend(steps(0, 3)),
            lambda: rb.add(steps(0, 1)[0]),
            lambda: rb.__setitem__(0, steps(0, 1)[0]),
            lambda: rb.update_if_present(index=torch.tensor([0]), generation=torch.tensor([0]), patch=steps(0, 1)),
            lambda: rb.writer.write(rb.storage, steps(0, 1), False, 0),
            lambda: rb.storage.set(0, steps(0, 1)),
        ):
            with pytest.raises(RuntimeError, match="member"):
                write()
        assert rb.write_count == 25
        rb[0].extend(steps(10, 14))
        assert rb.write_count == 29

    def test_empty_empties_the_members(self):
        rb = ensemble()
        rb.empty()
        assert (len(rb[0]), len(rb[1]), rb.write_count) == (0, 0, 0)
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            rb.sample()

    def test_ensemble_is_made_of_parts(self):
        storages = StorageEnsemble(
            LazyTensorStorage(20), LazyTensorStorage(20), transforms=[None, lambda b: b.set("obs", b["obs"] * 0)]
        )
        rb = ReplayBufferEnsemble(
            storages=storages, samplers=SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True),
            writers=WriterEnsemble(TensorDictRoundRobinWriter(), TensorDictRoundRobinWriter()), batch_size=4,
        )  # fmt: skip
        rb[0].extend(steps(0, 10))
        rb[1].extend(steps(1000, 1010))
        batch = rb.sample()
        assert batch.shape == (2, 2) and not batch["obs"][1].any() and (batch["n"][0] < 10).all()
        again = ReplayBufferEnsemble(
            storages=[LazyTensorStorage(5)], samplers=[RandomSampler()], writers=[RoundRobinWriter()], batch_size=2
        )
        again[0].extend(torch.arange(3))
        assert again.sample().shape == (1, 2)

    def test_parts_can_be_exchanged(self):
        rb = ensemble()
        old = rb.set_sampler(SamplerEnsemble(RandomSampler(), RandomSampler(), p=[0, 1]))
        assert type(old) is SamplerEnsemble and rb.sample(return_info=True)[1]["buffer_ids"].unique().tolist() == [1]
        with pytest.raises(ValueError, match="SamplerEnsemble of as many"):
            rb.set_sampler(RandomSampler())
        assert rb.sample(return_info=True)[1]["buffer_ids"].unique().tolist() == [1]

    def test_a_storage_ensemble_reads_what_info_names(self):
        rb = ensemble(sample_from_all=True)
        batch, info = rb.sample(return_info=True)
        assert [numbers(b) for b in rb.storage.get(info)] == numbers(batch)

    def test_a_sampler_ensemble_draws_from_a_storage_ensemble(self):
        rb = ensemble(sample_from_all=True)
        index, info = rb.sampler.sample(rb.storage, 8)
        assert index.shape == info["buffer_ids"].shape == (2, 4)

    def test_its_parts_print_in_the_usual_form(self):
        said = repr(ensemble())
        for part in ("ReplayBufferEnsemble(\n", "storages=StorageEnsemble(storages=[LazyTensorStorage", "transforms=[",
                     "samplers=SamplerEnsemble(samplers=[RandomSampler(), RandomSampler()], p=None",
                     "writers=WriterEnsemble(writers=[TensorDictRoundRobinWriter(cursor=10)", "batch_size=10",
                     "transform=Compose()", "collate_fn=None"):  # fmt: skip
            assert part in said

    def test_it_can_be_sent_to_another_process(self):
        storages = [LazyTensorStorage(20, shared=True) for _ in range(2)]
        for k, storage in enumerate(storages):
            TensorDictReplayBuffer(storage=storage).extend(steps(1000 * k, 1000 * k + 9))
        rb = ensemble(*(TensorDictReplayBuffer(storage=s) for s in storages))
        pickle_state = rb.__getstate__()
        assert "_parts" not in pickle_state
        with pytest.raises(StorageError, match="Cannot share"):
            ForkingPickler.dumps(ensemble())  # private memory stays in its process


class TestSettings:
    @each(
        ("settings", "said"),
        [
            ({"p": [1, 1], "sample_from_all": True}, "leave p out"),
            ({"num_buffer_sampled": 3, "sample_from_all": True}, "leave it out"),
            ({"p": [1, 1, 1]}, "one weight for each of 2"),
            ({"p": 3.0}, "one weight"),
            ({"p": [-1, 2]}, "0 or more"),
            ({"p": [0, 0]}, "one above 0"),
            ({"p": [1, float("nan")]}, "0 or more"),
            ({"num_buffer_sampled": 0}, "an integer of 1 or more"),
            ({"batch_size": 7}, "batch_size=7 does not divide.*multiple of 2"),
            ({"collate_fns": [None]}, "2 members, 1 collate_fns"),
        ],
    )
    def test_settings_that_contradict_are_refused(self, settings, said):
        with pytest.raises(ValueError, match=said):
            ensemble(**settings)

    def test_a_batch_size_that_does_not_divide_is_refused_at_the_call(self):
        rb = ensemble(batch_size=None)
        with pytest.raises(ValueError, match="multiple of 2"):
            rb.sample(7)

    def test_members_are_buffers_or_parts(self):
        a = member(0, 10)
        with pytest.raises(ValueError, match="needs buffers"):
            ReplayBufferEnsemble()
        with pytest.raises(ValueError, match="not of both"):
            ReplayBufferEnsemble(a, storages=[LazyTensorStorage(5)])
        with pytest.raises(TypeError, match="replay buffers, got a int"):
            ReplayBufferEnsemble(3)
        with pytest.raises(ValueError, match="1 storages, 2 samplers and 1 writers"):
            ReplayBufferEnsemble(
                storages=[LazyTensorStorage(5)],
                samplers=[RandomSampler(), RandomSampler()],
                writers=[RoundRobinWriter()],
            )
        with pytest.raises(ValueError, match="twice"):
            ReplayBufferEnsemble(a, a)
        with pytest.raises(TypeError, match="takes no shared"):
            ReplayBufferEnsemble(a, shared=True)
        for cls in (StorageEnsemble, SamplerEnsemble, WriterEnsemble):
            with pytest.raises(ValueError, match="at least one"):
                cls()

    def test_a_sampler_ensemble_needs_an_ensemble(self):
        with pytest.raises(ValueError, match="as many storages"):
            ReplayBuffer(storage=LazyTensorStorage(5), sampler=SamplerEnsemble(RandomSampler()))


class TestSaving:
    def make(self, **kwargs):
        return ReplayBufferEnsemble(
            TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement()),
            TensorDictReplayBuffer(storage=ListStorage(20), sampler=PrioritizedSampler(20, 1.0, 0.5)),
            TensorDictReplayBuffer(
                storage=LazyMemmapStorage(5),
                writer=TensorDictMaxValueWriter(("next", "reward")),
                sampler=RandomSampler(),
            ),
            **{"batch_size": 9, "generator": torch.Generator().manual_seed(5), "p": [1, 2, 3], **kwargs},
        )

    def fill(self, rb):
        rb[0].extend(steps(0, 13))
        rb[1].extend(steps(1000, 1015))
        rb[2].extend(steps(2000, 2008))
        rb[1].update_priority(torch.arange(5), torch.arange(5.0))

    @each("prefetch", [0, 2])
    @each("memory", [False, True])
    def test_a_twin_goes_on_the_same(self, tmp_path, prefetch, memory):
        rb, twin = self.make(prefetch=prefetch), self.make(prefetch=prefetch, p=None)
        self.fill(rb)
        twin[0].extend(steps(0, 3))
        for k in range(4):
            rb.sample()
            if memory:
                twin.load_state_dict(rb.state_dict())
            else:
                rb.dumps(tmp_path / str(k))
                twin.loads(tmp_path / str(k))
            assert twin.sampler.p == [1, 2, 3] and twin.write_count == rb.write_count
            state = rb.state_dict()
            expected = [rb.sample(return_info=True) for _ in range(5)]
            for batch, info in expected:
                other, said = twin.sample(return_info=True)
                assert numbers(batch) == numbers(other)
                assert all(torch.equal(info[key], said[key]) for key in ("index", "buffer_ids", "generation"))
            rb.load_state_dict(state)
        more = steps(2010, 2014)
        assert rb[2].extend(more).tolist() == twin[2].extend(more).tolist()

    def test_a_members_epoch_goes_on_in_a_twin_that_held_other_rows(self, tmp_path):
        def make(capacity):
            return ensemble(*(
                TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=SamplerWithoutReplacement())
                for _ in range(2)
            ), sample_from_all=True, batch_size=6)  # fmt: skip

        rb, twin = make(10), make(10)
        twin[0].extend(steps(0, 4))
        for k in range(2):
            rb[k].extend(steps(1000 * k, 1000 * k + 15))
        first = numbers(rb.sample())
        rb.dumps(tmp_path)
        twin.loads(tmp_path)
        rest = [numbers(twin.sample()) for _ in range(2)]
        for k in range(2):
            assert len({n for batch in [first, *rest] for n in batch[k]}) == 9

    def test_an_empty_ensemble_and_a_single_part_can_be_saved(self, tmp_path):
        rb, twin = self.make(), self.make()
        rb.dumps(tmp_path / "empty")
        self.fill(twin)
        twin.loads(tmp_path / "empty")
        assert twin.write_count == 0
        self.fill(rb)
        rb.storage.dumps(tmp_path / "storage")
        twin.storage.loads(tmp_path / "storage")
        assert [len(m) for m in twin.storage.storages] == [10, 15, 5]

    def test_ensemble_is_saved_in_the_background_while_members_are_written(self, tmp_path):
        rb, twin = self.make(), self.make()
        self.fill(rb)
        expected = [numbers(member[:]) for member in (rb[0], rb[1], rb[2])]
        handle = rb.dumps(tmp_path, blocking=False)
        rb[0].extend(steps(5000, 5007))
        handle.result(60)
        twin.loads(tmp_path)
        assert [numbers(member[:]) for member in (twin[0], twin[1], twin[2])] == expected

    def test_members_that_have_not_changed_are_not_written_again(self, tmp_path):
        rb, twin = self.make(), self.make()
        self.fill(rb)
        rb.dumps(tmp_path, keep_last=2)
        rb[0].extend(steps(5000, 5007))
        rb.dumps(tmp_path, keep_last=2)
        links = {p.parts[-3]: p.stat().st_nlink for p in tmp_path.glob("g-000002/member-*/storage/*")}
        assert links == {"member-00000": 1, "member-00001": 2, "member-00002": 2}
        twin.loads(tmp_path)
        assert numbers(twin[0][:]) == numbers(rb[0][:])

    def test_what_does_not_fit_is_listed_and_changes_nothing(self, tmp_path):
        rb = self.make()
        self.fill(rb)
        rb.dumps(tmp_path)
        small = ReplayBufferEnsemble(
            TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=RandomSampler()), rb[1], rb[2],
            batch_size=6, num_buffer_sampled=2, generator=torch.Generator(),
        )  # fmt: skip
        with pytest.raises(
            ValueError, match=r"num_buffer_sampled=2 here, 3 there.*sampler 0 is a Random.*member 0: .*room"
        ):
            small.loads(tmp_path)
        with pytest.raises(ValueError, match="2 samplers here, 3 there"):
            ReplayBufferEnsemble(rb[0], rb[1], batch_size=6).loads(tmp_path)
        with pytest.raises(CheckpointError, match="sample_from_all=True here, False there"):
            ReplayBufferEnsemble(rb[0], rb[1], rb[2], batch_size=6, sample_from_all=True).loads(tmp_path)
        with pytest.raises(CheckpointError, match="saved as 'ensemble'"):
            TensorDictReplayBuffer(storage=LazyTensorStorage(4)).loads(tmp_path)
        assert rb.write_count == 13 + 15 + 8

    def test_one_damaged_file_leaves_every_member_as_it_was(self, tmp_path):
        rb = self.make()
        self.fill(rb)
        rb.dumps(tmp_path)
        file = next(tmp_path.glob("g-*/member-00002/storage/rows-*.bin"))
        os.chmod(file, 0o644)
        content = bytearray(file.read_bytes())
        content[3] ^= 1
        file.write_bytes(content)
        twin = self.make()
        twin[0].extend(steps(50, 53))
        with pytest.raises(CorruptCheckpointError, match="member-00002"):
            twin.loads(tmp_path)
        assert numbers(twin[0][:]) == [50, 51, 52] and twin.write_count == 3
        fresh = self.make()
        with pytest.raises(CorruptCheckpointError, match="member-00002"):
            fresh.loads(tmp_path)
        assert [len(m) for m in fresh.storage.storages] == [0, 0, 0]

    def test_each_members_load_is_planned_once(self, tmp_path):
        class Counting(TensorStorageCheckpointer):
            plans = 0

            def plan_restore(self, reader, state):
                self.plans += 1
                return super().plan_restore(reader, state)

        storages = [LazyTensorStorage(10, checkpointer=Counting()) for _ in range(2)]
        rb = ReplayBufferEnsemble(*(ReplayBuffer(storage=storage) for storage in storages), batch_size=4)
        for one, start in ((rb[0], 0), (rb[1], 100)):
            one.extend(steps(start, start + 5))
        rb.dumps(tmp_path)
        rb.loads(tmp_path)
        assert [storage.checkpointer.plans for storage in storages] == [1, 1]
        assert [numbers(one[:])[0] for one in (rb[0], rb[1])] == [0, 100]

    def test_hooks_belong_to_the_members(self):
        with pytest.raises(ValueError, match="members"):
            StorageEnsembleCheckpointer().register_save_hook(lambda rows: rows)


def read_at_once(storages, slots, shape, sequences=False):
    tables = joining.joint_rows(storages)
    return None if tables is None else tables[0].read_many(tables[1:], slots, shape, None, sequences, None)


class TestReadingAtOnce:
    """The way straight into one batch gives what reading one by one gives."""

    @pytest.mark.parametrize("numbers_too", [False, True])
    def test_joint_read_equals_reading_members_one_by_one(self, numbers_too):
        a, b = member(0, 10), member(1000, 15)
        index = torch.tensor([[3, 9, 0], [14, 14, 2]])
        read = read_at_once([a.storage, b.storage], index, (2, 3), numbers_too)
        each = [rb.storage.read(slots, sequences=numbers_too) for rb, slots in zip((a, b), index, strict=True)]
        assert (read[0] == torch.stack([one[0] for one in each])).all()
        assert (read[3] is None) != numbers_too
        if numbers_too:
            assert torch.equal(read[3], torch.cat([one[3] for one in each]))

    def test_rows_of_other_layouts_and_storages_are_not_read_at_once(self):
        a, other = member(0, 10), TensorDictReplayBuffer(storage=LazyTensorStorage(5))
        index = torch.zeros(2, 1, dtype=torch.int64)
        assert read_at_once([a.storage, other.storage], index, (2, 1)) is None
        other.extend(steps(0, 5).exclude("obs"))
        assert read_at_once([a.storage, other.storage], index, (2, 1)) is None
        for storage in (member(0, 3, ListStorage).storage, TensorStorage(steps(0, 3)), ListStorage(3)):
            assert read_at_once([a.storage, storage], index, (2, 1)) is None
            assert read_at_once([storage, a.storage], index, (2, 1)) is None

    def test_slots_outside_or_of_no_row_are_noticed_in_any_member(self):
        a, b = member(0, 10), member(1000, 15)
        with pytest.raises(IndexError, match="outside 0 to 19"):
            read_at_once([a.storage, b.storage], torch.tensor([[0], [20]]), (2, 1))
        with pytest.raises(IndexError, match="outside"):
            read_at_once([a.storage, b.storage], torch.tensor([[-1], [0]]), (2, 1))
        assert read_at_once([a.storage, b.storage], torch.tensor([[9, 12], [15, 3]]), (2, 2))[2] == [1, 2]

    def test_sizes_that_do_not_fit_are_refused(self):
        a, b = member(0, 10).storage, member(1000, 15).storage
        with pytest.raises(ValueError, match="as many slots"):
            read_at_once([a, b], torch.zeros(3, dtype=torch.int64), (3,))
        with pytest.raises(ValueError, match="differ"):
            read_at_once([a, b], torch.zeros(4, dtype=torch.int64), (2, 3))
        with pytest.raises(TypeError, match="contiguous"):
            read_at_once([a, b], torch.zeros(2, 4, dtype=torch.int64)[:, ::2], (2, 2))
        with pytest.raises(ValueError, match="for each member"):
            _native.joint_index([torch.zeros(3, dtype=torch.int64)], [0, 1])
        for wrong in (torch.zeros(2, dtype=torch.int64), torch.zeros(3), None, torch.zeros(3, 1, dtype=torch.int64)):
            assert _native.joint_index([torch.zeros(3, dtype=torch.int64), wrong], [0, 1]) is None

    def test_rows_overwritten_meanwhile_are_drawn_again_by_their_member(self):
        rb = ensemble(sample_from_all=True)
        sampler = rb[1].sampler
        first, drawn = sampler.sample, []

        def sample(storage, n):
            drawn.append(n)
            if len(drawn) == 1:
                return torch.tensor([0, 17, 18, 19, 1]), {}  # of which three have no row
            return first(storage, n)

        sampler.sample = sample
        batch, info = rb.sample(return_info=True)
        check(rb, batch, info)
        assert drawn == [5, 3]

    def test_members_whose_rows_were_replaced_give_their_own_numbers(self):
        rbs = [
            TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter()) for _ in range(2)
        ]
        for one in rbs:
            one.extend(steps(0, 9))
        rb = ReplayBufferEnsemble(*rbs, batch_size=6)
        _, info = rb.sample(return_info=True)
        assert (info["generation"] >= _native.FIRST_REPLACED).any()


class TestNativeBatches:
    """A batch in one native call is what drawing and reading step by step gives, with the same random numbers."""

    @staticmethod
    def both_ways(rb, seed=3, rounds=5):
        """Batches of the native call, and step by step."""
        torch.manual_seed(seed)
        natively = [rb.sample() for _ in range(rounds)]
        assert rb._parts.reader.batch(rb.batch_size, only_native=True) is not None
        torch.manual_seed(seed)
        return zip(natively, [rb.sample(return_info=True) for _ in range(rounds)], strict=True)

    @each("transform", [None, RewardScaling(1.0, 2.0), SelectTransform("obs")])
    @each("cls", [TensorDictReplayBuffer, ReplayBuffer, by_priority, tensordicts_by_priority])
    def test_native_batch_equals_reading_step_by_step(self, cls, transform):
        rb = ReplayBufferEnsemble(
            *(member(100 * k, 9 + k, cls=cls, transform=transform) for k in range(3)), batch_size=12, p=[1, 2, 3]
        )
        for batch, (expected, info) in self.both_ways(rb):
            assert list(batch.keys(True)) == list(expected.keys(True)) and (batch == expected).all()
            assert batch.batch_size == (3, 4) and batch.device == expected.device
            assert {batch[key].dtype for key in batch.keys(True, True)} == {
                expected[key].dtype for key in expected.keys(True, True)
            }
            assert torch.equal(batch["index", "index"], info["index"]) and not batch.is_locked
            assert torch.equal(batch["index", "buffer_ids"], info["buffer_ids"])
            assert batch["index"].batch_size == expected["index"].batch_size

    @pytest.mark.parametrize("form", [lambda td: td.to_dict(), lambda td: td["obs"]], ids=["dicts", "tensors"])
    def test_dicts_and_tensors_too(self, form):
        rbs = [ReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]
        for k, one in enumerate(rbs):
            one.extend(form(steps(100 * k, 100 * k + 12)))
        for batch, (expected, _) in self.both_ways(ReplayBufferEnsemble(*rbs, batch_size=8, sample_from_all=True)):
            pairs = [(batch, expected)] if isinstance(batch, torch.Tensor) else [
                (batch["obs"], expected["obs"]), (batch["index"]["index"], expected["index"]["index"]),
                (batch["index"]["buffer_ids"], expected["index"]["buffer_ids"]),
            ]  # fmt: skip
            assert all(torch.equal(mine, theirs) for mine, theirs in pairs)

    @each("seed", range(2))
    @each("cls", [TensorDictReplayBuffer, by_priority, tensordicts_by_priority])
    def test_all_three_ways_give_the_same_while_members_are_written(self, cls, seed, monkeypatch):
        """One native call; drawing, then reading all members at once; drawing, then reading one after the other."""
        random = torch.Generator().manual_seed(seed)

        def number(most):
            return int(torch.randint(1, most + 1, (), generator=random))

        rb = ReplayBufferEnsemble(
            *(member(1000 * k, number(20), cls=cls) for k in range(3)),
            batch_size=4 * number(5),
            num_buffer_sampled=4,
            p=torch.rand(3, generator=random) + 0.1,
        )
        for round_ in range(8):
            for k in range(3):
                rb[k].extend(steps(1000 * k + 100 * round_, 1000 * k + 100 * round_ + number(15)))
            batches = []
            for way in ("native", "at once", "one by one"):
                torch.manual_seed(round_)
                with monkeypatch.context() as patch:
                    if way == "one by one":
                        patch.setattr(rb._parts.reader, "_reads_at_once", False)
                    batch = rb._parts.reader.batch(rb.batch_size, only_native=True) if way == "native" else None
                    info = {}
                    if batch is None:
                        batch, info = rb._parts.reader.sample(rb.batch_size, generations=True)
                assert (way == "native") == (not info)
                batches.append((batch, torch.get_rng_state()))
            (first, state), *others = batches
            for other, its_state in others:
                assert list(first.keys(True)) == list(other.keys(True)) and torch.equal(state, its_state)
                assert all(torch.equal(first[key], other[key]) for key in first.keys(True, True))
                assert all(first[key].dtype == other[key].dtype for key in first.keys(True, True))
            if cls is not TensorDictReplayBuffer:
                rb.update_priority(info, torch.rand(info["index"].shape, generator=random))

    def test_an_own_generator_draws_the_same(self):
        def batches(info):
            rb = ensemble(generator=Generator(4))
            return [rb.sample(return_info=True)[0] if info else rb.sample() for _ in range(5)]

        assert all((a == b).all() for a, b in zip(batches(False), batches(True), strict=True))

    def test_iterating_uses_it_too(self, monkeypatch):
        rb = ensemble()
        monkeypatch.setattr(rb._parts.reader, "read", None)
        for batch, _ in zip(rb, range(3), strict=False):
            check(rb, batch, {"index": batch["index", "index"], "buffer_ids": batch["index", "buffer_ids"]})

    def test_members_that_change_later_are_read_as_they_are_then(self):
        a, b = member(0, 12), TensorDictReplayBuffer(storage=LazyTensorStorage(20))
        rb = ReplayBufferEnsemble(a, b, batch_size=8, sample_from_all=True)
        b.extend(steps(100, 112))
        assert rb.sample()[1]["n"].min() >= 100 and rb._parts.reader.batch(8, only_native=True) is not None
        b.empty()
        b.extend(steps(200, 212))
        assert rb.sample()[1]["n"].min() >= 200

    @each("other", ["keys", "list", "slices", "epochs", "empty"])
    def test_other_members_are_read_step_by_step(self, other):
        made = {
            "keys": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(20)),
            "list": lambda: member(0, 12, ListStorage),
            "slices": lambda: member(0, 12, sampler=SliceSampler(slice_len=2, traj_key="traj")),
            "epochs": lambda: member(0, 12, sampler=SamplerWithoutReplacement()),
            "empty": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(20)),
        }[other]()
        if other == "keys":
            made.extend(steps(0, 12).exclude("obs"))
        rb = ReplayBufferEnsemble(member(0, 12), made, batch_size=8, sample_from_all=True)
        if other == "empty":
            with pytest.raises(RuntimeError):
                rb.sample()
        elif other != "slices":
            assert rb.sample().shape == (2, 4)
        assert rb._parts.reader.batch(8, only_native=True) is None

    def test_rows_that_are_overwritten_meanwhile_are_never_in_a_batch(self):
        rbs = [ReplayBuffer(storage=LazyTensorStorage(6)) for _ in range(2)]
        for one in rbs:
            one.extend(torch.zeros(6, 20_000, dtype=torch.int64))
        rb, stop = ReplayBufferEnsemble(*rbs, batch_size=8), threading.Event()

        def write():
            for number in itertools.count(1):
                if stop.is_set():
                    return
                rbs[number % 2].add(torch.full((20_000,), number))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(60):
                batch = rb.sample()
                assert (batch == batch[..., :1]).all()
        finally:
            stop.set()
            writer.join()

    def test_what_does_not_fit_together_is_refused(self):
        rb = ensemble()
        rb.sample()
        members = [(one.plan.native, one.sampler) for one in rb._parts.reader.members]
        sources = [one.storage.native.source for one in rb._parts.reader.members]
        maker = _native.BatchMaker(members, rb._parts.reader.sampler)
        assert maker.sample(sources, 12).batch_size == (2, 6)
        narrow = ReplayBuffer(storage=LazyTensorStorage(20))
        narrow.extend(torch.zeros(20, dtype=torch.uint8))
        with pytest.raises(ValueError, match="source is needed for each member"):
            maker.sample(sources[:1], 12)
        with pytest.raises(TypeError, match="source is needed for each member"):
            maker.sample([None] * 2, 12)
        with pytest.raises(ValueError, match="does not fit the rows"):
            maker.sample([*sources[:1], narrow.storage.native.source], 12)
        with pytest.raises(IndexError, match="no such form"):
            maker.sample(sources, 12, False, 1)
        for wrong, error in (([], ValueError), ([(None, rb.sampler)], TypeError), (members, ValueError)):
            with pytest.raises(error):
                _native.BatchMaker(wrong)
        with pytest.raises(ValueError, match="entries are each row's index, weight or member"):
            _native.BatchMaker(members[:1], None, [[("a", "age")]])


class TestTransformsOfAllMembers:
    """What is known to act on each row by itself runs once, on the rows of all members; the result is the same."""

    CHANGES = (
        RewardScaling(1.0, 2.0),
        ObservationNorm(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 2.0, 7.0]), in_keys=["obs"]),
        Compose(ClipTransform(["obs"], low=0.0, high=9.0), SignTransform([("next", "reward")], ["sign"])),
        DTypeCastTransform(torch.float32, torch.float64),
        Compose(SelectTransform("obs", ("next", "small")), ExcludeTransform(("next", "small"))),
        ExcludeTransform("index", "next"),
        DTypeCastTransform(torch.int64, torch.int32),
        ExcludeTransform("obs", ("next", "small")),
    )

    @each("cls", [TensorDictReplayBuffer, ReplayBuffer])
    @each("transform", CHANGES)
    def test_joint_transform_equals_that_of_each_member(self, transform, cls, monkeypatch):
        rb = ReplayBufferEnsemble(*(member(100 * k, 12, cls=cls, transform=transform) for k in range(3)), batch_size=12)
        torch.manual_seed(2)
        together, info = rb.sample(return_info=True)
        monkeypatch.setattr(reader, "joint_transform", lambda storage, transforms: None)
        torch.manual_seed(2)
        one_by_one, expected_info = rb.sample(return_info=True)
        assert torch.equal(info["index"], expected_info["index"])
        assert set(together.keys(True, True)) == set(one_by_one.keys(True, True))
        assert together.batch_size == (3, 4) and (together == one_by_one).all()
        for key in one_by_one.keys(True, True):
            assert together[key].dtype is one_by_one[key].dtype, key

    @each(
        ("transform", "calls"),
        [
            (RewardScaling(1.0, 2.0), 1),
            (ClipTransform(["obs"], low=0.0), 1),
            (RewardScaling(torch.ones(4, 1), 2.0), 2),  # a value for each place in a member's batch
            (ObservationNorm(torch.zeros(4, 3), 1.0, in_keys=["obs"]), 2),
            (VecNorm(in_keys=["obs"]), 2),
            (Compose(RewardScaling(1.0, 2.0), lambda batch: batch), 2),
        ],
    )
    def test_only_what_acts_by_row_sees_the_rows_of_all(self, transform, calls):
        rb = ReplayBufferEnsemble(*(member(100 * k, 12, transform=transform) for k in range(2)), batch_size=8)
        seen = []
        forward = transform.forward
        transform.forward = lambda batch: seen.append(batch.batch_size) or forward(batch)
        batch = rb.sample()
        assert batch.batch_size == (2, 4) and seen == ([(2, 4)] if calls == 1 else [(4,), (4,)])

    def test_a_class_of_the_users_own_sees_each_member(self):
        class Ranks(RewardScaling):
            def _apply_transform(self, value):
                return value.argsort(0).argsort(0).to(value.dtype)

        own = Ranks(0.0, 1.0)
        rb = ReplayBufferEnsemble(*(member(100 * k, 12, transform=own) for k in range(2)), batch_size=8)
        assert rb.sample()["next", "reward"].max() == 3

    def test_transforms_of_each_members_own_see_each_member(self):
        rb = ReplayBufferEnsemble(*(member(0, 12, transform=RewardScaling(k, 1.0)) for k in (1.0, 2.0)), batch_size=8)
        batch, info = rb.sample(return_info=True)
        reward = steps(0, 12)["next", "reward"]
        for k in range(2):
            assert torch.equal(batch[k]["next", "reward"], reward[info["index"][k]] + info["buffer_ids"][k, 0] + 1)

    @each(
        ("make", "is_same"),
        [
            (lambda k: RewardScaling(1.0, 2.0), True),
            (lambda k: Compose(ClipTransform(["obs"], low=0.0, high=9.0), SignTransform([("next", "reward")])), True),
            (lambda k: SelectTransform("obs", ("next", "reward")), True),
            (lambda k: DTypeCastTransform(torch.float32, torch.float64), True),
            (lambda k: RewardClipping(-1.0, 1.0), True),
            (lambda k: RewardClipping(-1.0, 1.0 + k), False),
            (lambda k: RewardScaling(1.0, 2.0 + k), False),
            (lambda k: RewardScaling(-0.0 if k else 0.0, 2.0), False),
            (lambda k: RewardScaling(torch.tensor(0.0, dtype=(torch.float32, torch.float64)[k]), 2.0), False),
            (lambda k: (ClipTransform, SignTransform)[k](["obs"], **({} if k else {"low": 0.0})), False),
            (lambda k: ClipTransform([("obs", ("next", "small"))[k]], low=0.0), False),
            (lambda k: ObservationNorm(0.0, 1.0, in_keys=["obs"]), False),  # its statistics may be computed later
            (lambda k: VecNorm(in_keys=["obs"]), False),
            (lambda k: lambda batch: batch, False),
        ],
    )
    def test_equal_transforms_of_each_member_run_once(self, make, is_same):
        rb = ReplayBufferEnsemble(*(member(100 * k, 12, transform=make(k)) for k in range(2)), batch_size=8)
        joint = rb._parts.reader._joint_transform(rb._parts.reader.members)
        assert (joint is not None) is is_same

    def test_equal_transforms_are_looked_at_for_each_batch(self):
        first, second = RewardScaling(1.0, 2.0), RewardScaling(1.0, 2.0)
        rb = ReplayBufferEnsemble(member(0, 12, transform=first), member(0, 12, transform=second), batch_size=8)
        assert second.does_the_same(first) and rb._parts.reader._joint_transform(rb._parts.reader.members) is not None
        second.scale.mul_(3)
        assert rb._parts.reader._joint_transform(rb._parts.reader.members) is None
        first.scale.mul_(3)
        assert rb._parts.reader._joint_transform(rb._parts.reader.members) is not None
        second.forward = lambda batch: batch
        assert rb._parts.reader._joint_transform(rb._parts.reader.members) is None

    def test_priorities_generations_and_draws_of_one_member_twice_stay(self):
        scaling = RewardScaling(1.0, 2.0)
        rbs = [
            TensorDictPrioritizedReplayBuffer(
                alpha=0.7, beta=0.5, storage=LazyTensorStorage(20), transform=scaling, track_generations=True
            )
            for _ in range(2)
        ]
        for k, rb in enumerate(rbs):
            rb.extend(steps(100 * k, 100 * k + 12))
        both = ReplayBufferEnsemble(*rbs, batch_size=8, num_buffer_sampled=4)
        batch, info = both.sample(return_info=True)
        rows = torch.stack(
            [
                rbs[i].storage[at]["next", "reward"]
                for i, at in zip(info["buffer_ids"][:, 0], info["index"], strict=True)
            ]
        )
        assert torch.equal(batch["next", "reward"], rows * 2 + 1)
        assert torch.equal(batch["generation"], info["generation"]) and batch["priority_weight"].shape == (4, 2)
        assert torch.equal(batch["priority_weight"], info["priority_weight"])


@pytest.mark.parametrize("tracks", [(True, False), (False, True)])
@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_batches_have_generations_where_one_member_tracks_them(tracks, transform):
    rbs = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=transform, track_generations=this)
        for this in tracks
    ]
    for rb in rbs:
        rb.extend(steps(0, 12))
    both = ReplayBufferEnsemble(*rbs, batch_size=4)
    for _ in range(20):
        batch, info = both.sample(return_info=True)
        assert torch.equal(batch["generation"], info["generation"])
        assert torch.equal(info["index_generation"], info["generation"])


def test_ensembles_over_the_same_storages_in_other_orders_lock_them_in_one_order(tmp_path):
    storages = [LazyTensorStorage(20) for _ in range(2)]
    ensembles = [
        ReplayBufferEnsemble(*(ReplayBuffer(storage=storage) for storage in order), batch_size=4)
        for order in (storages, storages[::-1])
    ]
    for number, rb in enumerate(ensembles):
        rb[0].extend(torch.arange(4.0))
        rb.dumps(tmp_path / str(number))
    for number, rb in enumerate(ensembles):  # which `lock_order` watches
        rb.loads(tmp_path / str(number))
        rb.state_dict()


def test_ensembles_with_the_same_members_in_other_orders_do_not_wait_for_each_other(monkeypatch):
    members = [ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, prefetch=1) for _ in range(2)]
    ensembles = [ReplayBufferEnsemble(*order, batch_size=4) for order in (members, members[::-1])]
    paused = BufferParts.paused

    @contextlib.contextmanager
    def slowly(parts):
        with paused(parts):
            time.sleep(0.1)
            yield

    monkeypatch.setattr(BufferParts, "paused", slowly)
    threads = [threading.Thread(target=rb.state_dict, daemon=True) for rb in ensembles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER)
        assert not thread.is_alive()


def test_epoch_of_one_member_keeps_its_rows_where_another_is_emptied_meanwhile():
    calls = itertools.count()

    def emptied_once(batch):
        if next(calls) == 1:
            other.empty()
            other.extend(torch.full((12,), 100))
        return batch

    ordered = ReplayBuffer(storage=LazyTensorStorage(12), sampler=SamplerWithoutReplacement(shuffle=False))
    ordered.extend(torch.arange(12))
    other = ReplayBuffer(storage=LazyTensorStorage(12), transform=emptied_once)
    other.extend(torch.full((12,), 50))
    both = ReplayBufferEnsemble(ordered, other, sample_from_all=True, batch_size=8)
    assert [both.sample()[0].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_prepared_batch_is_not_handed_out_after_its_member_was_emptied(monkeypatch):
    monkeypatch.setattr(prefetch, "PAYS_FROM_S", 0)
    members = [ReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]
    for k, member in enumerate(members):
        member.extend(torch.full((20,), k))
    both = ReplayBufferEnsemble(
        *members, sample_from_all=True, batch_size=8, prefetch=2, transform=lambda batch: batch + 0
    )
    for _ in range(3):
        both.sample()
    for prepared in both._parts.prefetcher._queue:
        prepared.work.result()
    members[1].empty()
    members[1].extend(torch.full((20,), 7))
    assert both.sample()[1].tolist() == [7, 7, 7, 7]


class Failing(ListStorage):
    def close(self):
        raise OSError("the disk is gone")


def test_an_ensemble_of_which_a_member_fails_to_close_stays_one():
    ensemble = StorageEnsemble(ListStorage(3), Failing(3))
    with pytest.raises(OSError, match="the disk is gone"):
        ensemble.close()
    with pytest.raises(RuntimeError, match="not written to as a whole"):
        ensemble.check(torch.zeros(1), False)
    assert len(ensemble) == 2 and ensemble._storage == [[], []] and not ensemble.supports_conditional_update
