"""Sequences for recurrent learners: windows of one length, with burn-in, padding, masks and marks of beginnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram import _native
from engram.data.replay_buffers.episodes import Key, path_of
from engram.data.replay_buffers.samplers.base import Index
from engram.data.replay_buffers.samplers.marks import mark_first, put
from engram.data.replay_buffers.samplers.slices import SliceSampler, Weight

if TYPE_CHECKING:
    from engram.data.replay_buffers.storages.base import Storage


class SequenceSampler(SliceSampler):
    """Slices of exactly `slice_len` rows, to be reshaped to `[num_slices, slice_len]`.

    The first `burn_in` rows of each are there to bring a recurrent state up to date (Kapturowski et al., "Recurrent
    Experience Replay in Distributed Reinforcement Learning", 2019); the others are to be trained on. A trajectory is
    drawn uniformly, then where the training rows start in it, so that its first steps are trained on as well: there
    the burn-in is short or empty, and rows of padding stand before it. With `strict_length=False` also trajectories
    with fewer steps than training rows are drawn, with padding behind. Padding repeats the nearest step of the
    trajectory; `mask_key` is False there.

    `weight="steps"` draws every stored step with equal probability as the last of its sequence, with the steps before
    it in its trajectory, and padding before these where there are fewer than `slice_len`; never behind. That is what a
    learner needs that trains on one step and reads some before it, as DQN with stacks of four frames:
    `SequenceSampler(slice_len=4, burn_in=3, weight="steps")`.

    Args:
        burn_in: rows of burn-in, fewer than `slice_len`, which counts them too.
        mask_key: bool [n], True for steps, False for padding.
        init_key: bool [n, 1], marked at each sequence's first step (marks that the data have stay); None: not at all.
        weight: what is drawn uniformly: "trajectories" (then where training starts in it) or "steps" (the last of each
            sequence).
        strict_length: draw only from trajectories of at least as many steps as there are training rows. The default is
            True with `weight="trajectories"`, and False with "steps", so that every stored step is drawn.
        Others: as SliceSampler; there is no `span`. The last step, not the last row, is marked truncated and done.

    Raises:
        ValueError: `burn_in` is negative, or leaves no training rows (at `sample` where `num_slices` is given).

    Example:
        >>> sampler = SequenceSampler(num_slices=2, burn_in=2, traj_key="episode")
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=10)
        >>> steps = TensorDict({"episode": torch.zeros(9).long(), "step": torch.arange(9)}, [9])
        >>> _ = rb.extend(steps)
        >>> batch = rb.sample().reshape(2, 5)
        >>> batch["step"].tolist(), batch["collector", "mask"].tolist()
        ([[0, 0, 1, 2, 3], [2, 3, 4, 5, 6]], [[False, True, True, True, True], [True, True, True, True, True]])
        >>> warm_up, training = sampler.split(batch)
        >>> warm_up.shape, training["step"].tolist()
        (torch.Size([2, 2]), [[1, 2, 3], [4, 5, 6]])
    """

    def __init__(
        self,
        *,
        burn_in: int = 0,
        mask_key: Key = ("collector", "mask"),
        init_key: Key | None = "is_init",
        weight: Weight = "trajectories",
        strict_length: bool | None = None,
        **slices: Any,
    ) -> None:
        if "span" in slices:
            raise TypeError("sequences have one length: there is no span; use SliceSampler")
        strict = weight == "trajectories" if strict_length is None else strict_length
        super().__init__(weight=weight, strict_length=strict, **slices)
        if isinstance(burn_in, bool) or not hasattr(burn_in, "__index__") or int(burn_in) < 0:
            raise ValueError(f"burn_in must be 0 or more, got {burn_in!r}")
        self.burn_in = int(burn_in)
        if self.slice_len is not None:
            self._check_burn_in(self.slice_len)
        self.mask_key = path_of(mask_key, "mask_key")
        self.init_key = None if init_key is None else path_of(init_key, "init_key")

    def _check_burn_in(self, length: int) -> None:
        if self.burn_in >= length:
            raise ValueError(
                f"burn_in={self.burn_in} leaves no row to train on of sequences of {length}; slice_len counts both"
            )

    def most_rows(self, storage: Storage, batch_size: int) -> int:
        return batch_size

    def _rule(self, length: int) -> _native.SliceRule:
        self._check_burn_in(length)
        least = length - self.burn_in if self.strict_length else 1
        if self.weight == "steps":
            return _native.SliceRule(length, least, before=length - 1, pad=True, by_window=True)
        return _native.SliceRule(length, least, before=self.burn_in, pad=True)

    def _said(self, storage: Storage, slices: _native.SliceBatch) -> tuple[Index, dict[str, Any]]:
        index, info = super()._said(storage, slices)
        said: dict[Any, Any] = info
        said[self.mask_key if len(self.mask_key) > 1 else self.mask_key[0]] = slices.mask()
        return index, info

    def _mark(self, batch: Any, info: dict[str, Any], slices: _native.SliceBatch) -> None:
        super()._mark(batch, info, slices)
        put(batch, self.mask_key, slices.mask())
        if self.init_key is not None:
            mark_first(batch, self.init_key, slices)

    def _decisive(self) -> dict[str, Any]:
        return {**super()._decisive(), "burn_in": self.burn_in}

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Burn-in and training rows of a batch `[num_slices, slice_len]`: `[num_slices, burn_in]` and the rest."""
        return batch[:, : self.burn_in], batch[:, self.burn_in :]

    def __repr__(self) -> str:
        said = f"num_slices={self.num_slices}" if self.slice_len is None else f"slice_len={self.slice_len}"
        settings = f"burn_in={self.burn_in}, strict_length={self.strict_length}{self._weight_said}"
        return f"{type(self).__name__}({said}, {settings})"
