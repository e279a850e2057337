"""Transforms of images."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engram._checks import count
from engram.pytree import Key, Keys
from engram.transforms.base import Transform

_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
_BYTE_MODES = ("nearest", "nearest-exact", "bilinear")
_GREY = (0.2989, 0.587, 0.114)  # ITU-R BT.601, with the usual rounding of image libraries


class ToTensorImage(Transform, built_in=True):
    """Converts images `[*, H, W, C]` to floats `[*, C, H, W]`; integers of any dtype are divided by 255.

    Args:
        from_int: True divides floats by 255 as well, False divides nothing; None: integers only.
        unsqueeze: adds a leading dimension of 1 to a single image, one without batch dimensions.
        dtype: of the result; None: torch's default dtype for integers, the image's own for floats.
        in_keys: images, `["pixels"]` if None.
        out_keys: as Transform's.
        shape_tolerant: images whose last dimension is not 3 are left in their order.

    Raises:
        ValueError: an image has fewer than 3 dimensions.

    Example:
        >>> batch = {"pixels": torch.full((2, 4, 5, 3), 255, dtype=torch.uint8)}
        >>> image = ToTensorImage()(batch)["pixels"]
        >>> image.shape, image.dtype, image.max()
        (torch.Size([2, 3, 4, 5]), torch.float32, tensor(1.))
    """

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point dtype, got {dtype}")
        self.from_int, self.unsqueeze = from_int, bool(unsqueeze)
        self.dtype = dtype
        self.shape_tolerant = shape_tolerant

    _keeps_order = True

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3:
            raise ValueError(f"ToTensorImage takes images [*, H, W, C], got shape {list(value.shape)}")
        if not self.shape_tolerant or value.shape[-1] == 3:
            value = value.movedim(-1, -3)
        is_float = value.is_floating_point()
        dtype = self.dtype or (value.dtype if is_float else torch.get_default_dtype())
        divides = self.from_int if self.from_int is not None else not is_float and value.dtype is not torch.bool
        # One pass that permutes and converts; the result is contiguous, which is faster for networks.
        image = torch.empty(value.shape, dtype=dtype, device=value.device).copy_(value)
        image = image.div_(255) if divides else image
        return image.unsqueeze(0) if self.unsqueeze and image.ndim == 3 else image

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return not self.unsqueeze and all((row_ndim(key) or 0) >= 3 for key in self.in_keys)

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def _settings(self) -> dict[str, Any]:
        return {} if self.dtype is None else {"dtype": self.dtype}


class Resize(Transform, built_in=True):
    """Resizes images `[*, C, H, W]`: the last two dimensions become `[w, h]`, in this order.

    Args:
        w, h: the new sizes; without `h` the image becomes square.
        interpolation: "nearest", "nearest-exact", "bilinear", "bicubic" or "area", as torch's `interpolate` has them.
        in_keys: images, `["pixels"]` if None.
        out_keys: as Transform's.
        antialias: with "bilinear" and "bicubic", average over the source pixels when the image becomes smaller.

    Any number of leading dimensions, none included. Integers are rounded and keep their dtype.

    Example:
        >>> batch = {"pixels": torch.zeros(2, 5, 3, 84, 84, dtype=torch.uint8)}
        >>> Resize(42)(batch)["pixels"].shape
        torch.Size([2, 5, 3, 42, 42])
    """

    def __init__(
        self,
        w: int,
        h: int | None = None,
        interpolation: str = "bilinear",
        *,
        in_keys: Keys = None,
        out_keys: Keys = None,
        antialias: bool = False,
    ) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        self.w = count(w, "w")
        self.h = self.w if h is None else count(h, "h")
        # The value of image libraries' enums is the name.
        self.interpolation = str(interpolation.value if isinstance(interpolation, Enum) else interpolation)
        if self.interpolation not in _MODES:
            raise ValueError(f"interpolation must be one of {_MODES}, got {interpolation!r}")
        smooth = self.interpolation in ("bilinear", "bicubic")
        if antialias and not smooth:
            raise ValueError(f"antialias=True needs bilinear or bicubic interpolation, got {self.interpolation!r}")
        self.antialias = antialias
        self._options: dict[str, Any] = {"mode": self.interpolation}
        if smooth:
            self._options |= {"align_corners": False, "antialias": antialias}

    @property
    def _keeps_order(self) -> bool:  # type: ignore[override]
        return self.interpolation != "bicubic"  # bicubic weights may be negative

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3:
            raise ValueError(f"Resize takes images [*, C, H, W], got shape {list(value.shape)}")
        if value.shape[-2:] == (self.w, self.h):
            return value
        lead = value.shape[:-3]
        # A view if the leading dimensions are contiguous, as in batches from a buffer.
        images = value if value.ndim == 4 else value.reshape(-1, *value.shape[-3:])
        resized = self._resized(images)
        return resized if value.ndim == 4 else resized.reshape(*lead, *resized.shape[-3:])

    def _resized(self, images: Tensor) -> Tensor:
        if images.shape[0] == 0:
            return images.new_empty(0, images.shape[1], self.w, self.h)
        if images.is_floating_point() or self._takes_bytes(images):
            return functional.interpolate(images, (self.w, self.h), **self._options)
        resized = functional.interpolate(images.to(torch.float32), (self.w, self.h), **self._options)
        if images.dtype is torch.bool:
            return resized >= 0.5
        limits = torch.iinfo(images.dtype)
        return resized.round_().clamp_(limits.min, limits.max).to(images.dtype)

    def _takes_bytes(self, images: Tensor) -> bool:
        # torch resizes bytes directly, several times faster; but its bicubic weights differ for bytes and floats.
        return images.dtype is torch.uint8 and images.device.type == "cpu" and self.interpolation in _BYTE_MODES

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"w": self.w, "h": self.h, "interpolation": self.interpolation}
        return settings | ({"antialias": True} if self.antialias else {})


class GrayScale(Transform, built_in=True):
    """Converts images `[*, 3, H, W]` to grey `[*, 1, H, W]`, by the weights of ITU-R BT.601; integers keep their dtype.

    Raises:
        ValueError: an image has neither 3 channels nor 1.

    Example:
        >>> GrayScale()({"pixels": torch.ones(2, 3, 8, 8)})["pixels"].shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(self, in_keys: Keys = None, out_keys: Keys = None) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)

    _keeps_order = True

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 3 or value.shape[-3] not in (1, 3):
            raise ValueError(f"GrayScale takes images [*, 3, H, W], got shape {list(value.shape)}")
        if value.shape[-3] == 1:
            return value
        red, green, blue = value.unbind(-3)
        if value.is_floating_point():
            return (red * _GREY[0] + green * _GREY[1] + blue * _GREY[2]).unsqueeze(-3)
        grey = red.to(torch.float32) * _GREY[0] + green * _GREY[1] + blue * _GREY[2]
        return grey.round_().to(value.dtype).unsqueeze(-3)


class CenterCrop(Transform, built_in=True):
    """Cuts the middle out of images: the last two dimensions become `[w, h]`, in this order, as those of `Resize`.

    Args:
        w, h: the sizes; without `h` the piece is a square.
        in_keys: images, `["pixels"]` if None.
        out_keys: as Transform's.

    Raises:
        ValueError: a size below 1, or an image that is smaller.

    Example:
        >>> CenterCrop(84)({"pixels": torch.zeros(2, 3, 100, 120)})["pixels"].shape
        torch.Size([2, 3, 84, 84])
    """

    def __init__(self, w: int, h: int | None = None, in_keys: Keys = None, out_keys: Keys = None) -> None:
        super().__init__("pixels" if in_keys is None else in_keys, out_keys)
        self.w = count(w, "w")
        self.h = self.w if h is None else count(h, "h")

    _keeps_order = True

    def _apply_transform(self, value: Tensor) -> Tensor:
        if value.ndim < 2 or value.shape[-2] < self.w or value.shape[-1] < self.h:
            raise ValueError(f"CenterCrop({self.w}, {self.h}) takes larger images, got shape {list(value.shape)}")
        top, left = (round((size - part) / 2) for size, part in zip(value.shape[-2:], (self.w, self.h), strict=True))
        return value[..., top : top + self.w, left : left + self.h].contiguous()

    def acts_by_row(self, row_ndim: Callable[[Key], int | None]) -> bool:
        return all((row_ndim(key) or 0) >= 2 for key in self.in_keys)

    def does_the_same(self, other: Transform) -> bool:
        return self._has_settings_of(other)

    def _settings(self) -> dict[str, Any]:
        return {"w": self.w, "h": self.h}
