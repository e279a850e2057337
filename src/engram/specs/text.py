"""`Text`: texts as tensors, UTF-8 in a fixed number of bytes, so that a stored row has a place for them."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram._advice import advised
from engram.specs.tensors import Device, LeafTensorSpec, Unbounded, as_shape

Array = np.ndarray[Any, Any]


def utf8_size(character: str) -> int:
    """The bytes of a character in UTF-8; 0 for those of no tensor form: the character 0, and surrogates."""
    return 0 if character == "\0" else len(character.encode(errors="ignore"))


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


_LETTERS = string.ascii_letters + string.digits + " "


@advised
class Text(LeafTensorSpec):
    """Texts of at most `width` bytes in UTF-8: uint8 `[..., width]`, zeros after the end of a text.

    `encode` makes tensors of a text, or of nested lists of them; `decode` and `to_numpy` give the texts back.

    Args:
        charset: the characters that texts consist of; None: any, and draws are of letters, digits and spaces. The
            character 0, and surrogates, have no tensor form and are left out.
        min_length, max_length: the characters that texts have at least and at most; None: as many as have a place.

    Raises ValueError where `width` has no place for `max_length` characters, or no text is possible.

    >>> spec = Text(24)
    >>> spec.decode(spec.encode("go to the red ball"))
    'go to the red ball'
    >>> spec.expand(2, 24).decode(spec.encode(["left", "größer"]))
    ['left', 'größer']
    >>> Text(4, charset="ab", min_length=1).is_in(spec.encode("c")[:4])
    False
    """

    domain_ndim = 1

    def __init__(
        self,
        width: int,
        shape: Sequence[int] | int | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.uint8,
        *,
        charset: Iterable[str] | None = None,
        min_length: int = 0,
        max_length: int | None = None,
    ) -> None:
        whole = as_shape(width if shape is None else shape)
        if width < 1 or whole[-1:] != (width,):
            raise ValueError(f"width must be 1 or more and the last size of the shape, got {width} and {tuple(whole)}")
        if dtype is not torch.uint8:
            raise ValueError(f"texts are bytes, torch.uint8, got {dtype}")
        super().__init__(whole, device, dtype)
        self.width = width
        #: In their order, so that draws of a seed do not depend on that of a set.
        self.charset = None if charset is None else "".join(sorted(c for c in {*charset} if utf8_size(c)))
        places = 0 if self.charset == "" else width // max(map(utf8_size, self.charset or " "))
        self.min_length = min_length
        self.max_length = places if max_length is None or self.charset == "" else max_length
        if not 0 <= min_length <= self.max_length <= places:
            raise ValueError(
                f"width={width} has a place for {places} characters of charset={self.charset!r:.80}; got "
                f"min_length={min_length} and max_length={max_length}"
            )

    def domain_arguments(self) -> dict[str, Any]:
        if self.charset is None and not self.min_length and self.max_length == self.width:
            return {"width": self.width}
        lengths = {"min_length": self.min_length, "max_length": self.max_length}
        return {"width": self.width, "charset": self.charset, **lengths}

    def _draw(self, shape: torch.Size) -> Tensor:
        count, longest = shape[:-1].numel(), self.max_length
        drawn = torch.zeros((count, self.width), dtype=torch.uint8, device="cpu")
        if longest:
            letters = np.array(list(_LETTERS if self.charset is None else self.charset))
            texts = letters[torch.randint(len(letters), (count, longest), device="cpu").numpy()]
            length = torch.randint(self.min_length, longest + 1, (count, 1), device="cpu").numpy()
            texts[np.arange(longest) >= length] = ""
            for row, text in zip(drawn.numpy(), texts.view(f"U{longest}")[:, 0].tolist(), strict=True):
                row[:] = bytes_of_text(text, self.width)
        return drawn.reshape(shape).to(self.device)

    def _inside(self, value: Tensor) -> Tensor:
        return self.are_texts(value)

    def are_texts(self, value: Tensor) -> Tensor:
        """Whether tensors `[..., width]` of any dtype are texts of this spec, bool `[...]`."""
        rows = self._rows(value)
        inside = [np.array_equal(_rewritten(row), row) and self.fault_of(text_of_bytes(row)) is None for row in rows]
        are_bytes = (value.to(torch.uint8).to(value.dtype) == value).all(-1)
        return torch.tensor(inside, dtype=torch.bool, device=value.device).reshape(value.shape[:-1]) & are_bytes

    def fault_of(self, text: str) -> str | None:
        """What a text has that texts of this spec have not, other than too many bytes; None: nothing.

        >>> Text(4, charset="ab", min_length=1).fault_of("ac")
        "the character 'c'; the charset is 'ab'"
        """
        if not self.min_length <= len(text) <= self.max_length:
            return f"{len(text)} characters; it must have {self.min_length} to {self.max_length}"
        wrong = () if self.charset is None else [c for c in text if c not in self.charset]
        return f"the character {wrong[0]!r}; the charset is {self.charset!r}" if wrong else None

    def _nearest(self, value: Tensor) -> Tensor:
        rows = [bytes_of_text(self._fitted(row), self.width) for row in self._rows(value)]
        return torch.from_numpy(np.array(rows, np.uint8)).reshape(value.shape).to(value.device)

    def _fitted(self, row: Array) -> str:
        """The text of a row with characters of the charset alone, cut, or filled up with the first of them."""
        first = (self.charset or " ")[0]
        text = text_of_bytes(_rewritten(row))
        if self.charset is not None:
            text = "".join(c for c in text if c in self.charset)
        text = text[: self.max_length].ljust(self.min_length, first)
        return text if len(text.encode()) <= self.width else first * self.min_length

    def _rows(self, value: Tensor) -> Array:
        rows: Array = value.detach().cpu().to(torch.uint8).numpy().reshape(-1, self.width)
        return rows

    def encode(self, val: Any, *, ignore_device: bool = False) -> Tensor:
        """A text, nested lists or an array of texts, or a tensor of this spec, as a tensor of this spec.

        Raises ValueError for a text that is not of this spec, TypeError for values of other types.
        """
        if isinstance(val, Tensor):
            return super().encode(val, ignore_device=ignore_device)
        texts = np.asarray(val, dtype=object)
        for text in texts.reshape(-1):
            if not isinstance(text, str):
                raise TypeError(f"a text is a str, found a {type(text).__name__} ({text!r:.80}); decode bytes first")
        rows = [bytes_of_text(text, self.width) for text in texts.reshape(-1)]
        for text in texts.reshape(-1):
            if (fault := self.fault_of(text)) is not None:
                raise ValueError(f"the value is the text {text!r:.80}, which has {fault}")
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
