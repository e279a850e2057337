"""`Text`: texts as tensors, UTF-8 in a fixed number of bytes, so that a stored row has a place for them."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.specs.tensors import Device, LeafTensorSpec, Unbounded, as_shape

Array = np.ndarray[Any, Any]


def bytes_of_text(text: str, width: int, what: str = "the value") -> Array:
    """A text as uint8 `[width]`, UTF-8, zeros after its end.

    Raises ValueError, which begins with `what`, for a text that is longer, or has characters that UTF-8 or the zeros
    after the end have no place for.

    >>> bytes_of_text("go", 4).tolist()
    [103, 111, 0, 0]
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is the text {text!r:.80}, which UTF-8 cannot write: {error}") from error
    if len(encoded) > width or "\0" in text:
        reason = "has a character 0" if "\0" in text else f"has {len(encoded)} bytes in UTF-8"
        raise ValueError(
            f"{what} is the text {text!r:.80}, which {reason}; the spec has a place for {width} bytes, none of them 0. "
            "A space gymnasium.spaces.Text(max_length) of the longest text gives a longer one"
        )
    return np.frombuffer(encoded.ljust(width, b"\0"), np.uint8)


def text_of_bytes(row: Array) -> str:
    """The text of uint8 `[width]`; bytes that are not UTF-8 become U+FFFD.

    >>> text_of_bytes(bytes_of_text("größer", 16))
    'größer'
    """
    return row.tobytes().rstrip(b"\0").decode(errors="replace")


class Text(LeafTensorSpec):
    """Texts of at most `width` bytes in UTF-8: uint8 `[..., width]`, zeros after the end of a text.

    `encode` makes tensors of a text, or of nested lists of them; `decode` and `to_numpy` give the texts back. Draws are
    of letters, digits and spaces.

    >>> spec = Text(24)
    >>> spec.decode(spec.encode("go to the red ball"))
    'go to the red ball'
    >>> spec.expand(2, 24).decode(spec.encode(["left", "größer"]))
    ['left', 'größer']
    """

    domain_ndim = 1

    def __init__(
        self,
        width: int,
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        whole = as_shape(width if shape is None else shape)
        if width < 1 or whole[-1:] != (width,):
            raise ValueError(f"width must be 1 or more and the last size of the shape, got {width} and {tuple(whole)}")
        if dtype is not torch.uint8:
            raise ValueError(f"texts are bytes, torch.uint8, got {dtype}")
        super().__init__(whole, device, dtype)
        self.width = width

    def domain_arguments(self) -> dict[str, Any]:
        return {"width": self.width}

    def _draw(self, shape: torch.Size) -> Tensor:
        letters = torch.tensor(list((string.ascii_letters + string.digits + " ").encode()), dtype=torch.uint8)
        drawn = letters[torch.randint(len(letters), shape)]
        length = torch.randint(self.width + 1, shape[:-1]).unsqueeze(-1)
        return drawn.masked_fill(torch.arange(self.width) >= length, 0).to(self.device)

    def _inside(self, value: Tensor) -> bool:
        return all(np.array_equal(_rewritten(row), row) for row in self._rows(value))

    def _nearest(self, value: Tensor) -> Tensor:
        rows = [_rewritten(row) for row in self._rows(value.to(torch.uint8))]
        return torch.from_numpy(np.stack(rows)).reshape(value.shape).to(value.device)

    def _rows(self, value: Tensor) -> Array:
        rows: Array = value.detach().cpu().numpy().reshape(-1, self.width)
        return rows

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        """A text, nested lists or an array of texts, or a tensor of this spec, as a tensor of this spec.

        Raises ValueError for a text that is too long, TypeError for values of other types.
        """
        if isinstance(val, Tensor):
            return super().encode(val, ignore_device=ignore_device)
        texts = np.asarray(val, dtype=object)
        for text in texts.reshape(-1):
            if not isinstance(text, str):
                raise TypeError(f"a text is a str, found a {type(text).__name__} ({text!r:.80}); decode bytes first")
        rows = [bytes_of_text(text, self.width) for text in texts.reshape(-1)]
        stacked = torch.from_numpy(np.array(rows, np.uint8).reshape(*texts.shape, self.width))
        return stacked if ignore_device else stacked.to(self.device)

    def decode(self, value: Tensor) -> Any:
        """The text of a tensor `[width]`; of one with batch dimensions nested lists of texts."""
        return self._texts(value).tolist()

    def to_numpy(self, val: Tensor, safe: bool | None = None) -> Any:
        """Texts: a str, or an array of them with the batch dimensions."""
        if safe is not False:
            self.assert_is_in(val)
        texts = self._texts(val)
        return texts if texts.ndim else texts.item()

    def _texts(self, value: Tensor) -> Array:
        texts = np.empty(value.shape[:-1].numel(), object)
        texts[:] = [text_of_bytes(row) for row in self._rows(value)]
        return texts.reshape(value.shape[:-1])

    def to_torchrl(self) -> Any:
        """The bytes as TorchRL's `Unbounded`, which has no spec of fixed-width texts."""
        return Unbounded(self.shape, self.device, self.dtype).to_torchrl()


def _rewritten(row: Array) -> Array:
    """The bytes of the row's text without bytes that are not UTF-8, and without zeros before its end."""
    kept = row.tobytes().replace(b"\0", b"").decode(errors="ignore").encode()
    return np.frombuffer(kept.ljust(len(row), b"\0"), np.uint8)
