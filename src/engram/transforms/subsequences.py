"""`RandomCropTensorDict`: random pieces of the sequences of a batch."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from engram._checks import count, is_integer
from engram.pytree import Key, as_key, has_batch_size, require_tensor
from engram.transforms.base import Transform
from engram.transforms.env_specs import EnvSpecs


class RandomCropTensorDict(Transform, built_in=True):
    """On reading, crops each sequence of a batch `[*, T]` at a random position to `[*, sub_seq_len]`.

    Args:
        sub_seq_len: the number of steps of a piece.
        sample_dim: the batch dimension of time.
        mask_key: bool, False for padding at the ends of sequences, which is never drawn; None: there is no padding.

    Positions are drawn for each sequence, uniformly. For buffers whose items are trajectories; if the items are steps,
    use a `SliceSampler`.

    Raises:
        ValueError: `sub_seq_len` is below 1.
        RuntimeError: a sequence is shorter than a piece.
        TypeError: the batch is not a TensorDict.

    Example:
        >>> batch = TensorDict({"x": torch.arange(20).reshape(2, 10)}, [2, 10])
        >>> RandomCropTensorDict(4)(batch)["x"].diff()
        tensor([[1, 1, 1],
                [1, 1, 1]])
    """

    def __init__(self, sub_seq_len: int, sample_dim: int = -1, mask_key: Key | None = None) -> None:
        super().__init__()
        if not is_integer(sample_dim):
            raise ValueError(f"sample_dim must be the number of a dimension, got {sample_dim!r}")
        self.sub_seq_len, self.sample_dim = count(sub_seq_len, "sub_seq_len"), sample_dim
        self.mask_key = None if mask_key is None else as_key(mask_key)

    @property
    def needs_order(self) -> bool:
        return True

    def for_env(self, specs: EnvSpecs) -> Any:
        raise TypeError(
            "RandomCropTensorDict takes pieces of whole sequences, which an environment does not have yet: append it "
            "to the replay buffer"
        )

    def forward(self, batch: Any) -> Any:
        if type(batch) is list:
            return [self.forward(item) for item in batch]
        if not has_batch_size(batch):
            raise TypeError(f"RandomCropTensorDict takes TensorDicts, got a {type(batch).__name__}")
        dims, dim = batch.batch_dims, self.sample_dim
        if not -dims <= dim < dims:
            raise RuntimeError(f"sample_dim={dim} is no dimension of a batch {list(batch.batch_size)}")
        return self._cropped(batch, dim % dims)

    def _cropped(self, batch: TensorDictBase, dim: int) -> Any:
        shape, length = batch.batch_size, self.sub_seq_len
        lengths = torch.full((*shape[:dim], 1, *shape[dim + 1 :]), shape[dim], device="cpu")
        if self.mask_key is not None:
            mask = require_tensor(batch, self.mask_key, "RandomCropTensorDict").reshape(shape)
            lengths = mask.sum(dim, keepdim=True).cpu()
        if lengths.numel() and int(lengths.min()) < length:
            raise RuntimeError(
                f"a piece has sub_seq_len={length} steps, and a sequence of this batch {list(shape)} has "
                f"{int(lengths.min())}: take shorter pieces, or draw slices with a SliceSampler"
            )
        start = (torch.rand(lengths.shape, dtype=torch.float64, device="cpu") * (lengths - length + 1)).long()
        steps = torch.arange(length, device="cpu").reshape(length, *[1] * (len(shape) - dim - 1))
        places = start + steps

        def pieces(leaf: Tensor) -> Tensor:
            index = places.to(leaf.device).reshape(*places.shape, *[1] * (leaf.ndim - len(shape)))
            return leaf.gather(dim, index.expand(*places.shape, *leaf.shape[len(shape) :]))

        return batch.apply(pieces, batch_size=places.shape)

    def _settings(self) -> dict[str, Any]:
        return {"sub_seq_len": self.sub_seq_len, "sample_dim": self.sample_dim}
