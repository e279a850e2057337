"""The parts of a replay buffer and how they are wired together."""

from __future__ import annotations

import contextlib
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from engram.data.replay_buffers.draws import set_state, state_of
from engram.data.replay_buffers.prefetch import Prefetcher
from engram.data.replay_buffers.reading import Reader, stack_items
from engram.data.replay_buffers.samplers.base import Sampler
from engram.data.replay_buffers.samplers.uniform import RandomSampler
from engram.data.replay_buffers.storages.base import Storage
from engram.data.replay_buffers.storages.list import ListStorage
from engram.data.replay_buffers.storages.memmap import LazyMemmapStorage
from engram.data.replay_buffers.storages.tensor import LazyTensorStorage
from engram.data.replay_buffers.writers.base import Writer
from engram.data.replay_buffers.writers.round_robin import RoundRobinWriter
from engram.transforms.base import Transform
from engram.transforms.compose import Compose
from engram.transforms.foreign import as_transform

_DEFAULT_CAPACITY = 1000

B = TypeVar("B", bound="BufferParts")


class BufferParts:
    """Holds the parts, makes them know each other, and exchanges them. `ReplayBuffer` says what they are for."""

    def __init__(
        self,
        capacity: int | None = None,
        /,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        checkpointer: Any = None,
        track_generations: bool = False,
    ) -> None:
        self._storage = _with_capacity(_made(storage, Storage, "storage"), capacity)
        self._sampler: Any = _made(sampler, object, "sampler") or RandomSampler()
        self._writer = _made(writer, Writer, "writer") or self._default_writer()
        self._collate_fn = collate_fn
        self._batch_size = checked_batch_size(batch_size)
        self._generator = generator
        self._track_generations = track_generations
        self._pin_memory = bool(pin_memory) and torch.cuda.is_available()
        if pin_memory and not self._pin_memory:
            warnings.warn(
                "pin_memory=True does nothing here: this process sees no CUDA device to copy batches to", stacklevel=3
            )
        self._transform: Compose = transform  # made one by __setattr__
        if prefetch is not None and prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, got {prefetch}")
        self._prefetch = prefetch or 0
        self._dim_extend = dim_extend
        if dim_extend is not None and not 0 <= dim_extend < max(self._storage.ndim, 1):
            raise ValueError(f"dim_extend must be 0 to {self._storage.ndim - 1} for this storage, got {dim_extend}")
        if shared:
            self._share()
        if checkpointer is not None:
            self._storage.checkpointer = checkpointer
        self._wire()

    def _default_writer(self) -> Writer:
        return RoundRobinWriter()

    def __setattr__(self, name: str, value: Any) -> None:
        # Users set `rb._transform`. A property would cost its call at each write; this costs nothing there.
        if name != "_transform":
            object.__setattr__(self, name, value)
            return
        compose = value if isinstance(value, Compose) else Compose(*([] if value is None else [value]))
        for transform in compose:
            self._check_transform(transform)
        if "_reader" not in self.__dict__:
            object.__setattr__(self, name, compose)
            return
        with self._undisturbed():
            object.__setattr__(self, name, compose)
            self._reader.transform = compose

    def _check_transform(self, transform: Transform) -> None:
        """Raises TypeError for a transform that does not work here."""

    def _share(self) -> None:
        if isinstance(self._storage, LazyTensorStorage):
            self._storage.shared = True
        elif not isinstance(self._storage, LazyMemmapStorage):
            raise ValueError(
                f"shared=True needs LazyTensorStorage or LazyMemmapStorage, whose rows processes can share, "
                f"not {type(self._storage).__name__}"
            )

    def _wire(self) -> None:
        """Makes the parts know each other; again after each change of one."""
        self._check_parts()
        self._storage.attach(self)
        self._writer.register_storage(self._storage)
        if hasattr(self._sampler, "use_generator"):
            self._sampler.use_generator(self._generator)
        collate = self._collate_fn
        if collate is None and isinstance(self._storage, ListStorage):
            collate = stack_items
        attach = self._attach if self._attaches else None
        self._reader = Reader(
            self._storage, self._sampler, self._transform, collate, attach, self._pin_memory, self._track_generations
        )
        self._prefetcher = Prefetcher(self._reader, self._prefetch, self._drawn_from()) if self._prefetch else None

    def _check_parts(self) -> None:
        if hasattr(self._sampler, "check_storage"):
            self._sampler.check_storage(self._storage)

    @property
    def _attaches(self) -> bool:
        return False

    # Static: a buffer that its own reader held would stay, with all its memory, until the garbage collector comes.
    @staticmethod
    def _attach(index: Any, info: dict[str, Any]) -> dict[str, Any] | None:
        """Entries to put at the root of each sampled batch."""
        return None

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """No draws or changes of priorities meanwhile, and nothing that was prepared before."""
        with self.paused(), self._reader.lock:
            yield

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A block in which nothing is prepared ahead, and before which what was prepared is forgotten."""
        return contextlib.nullcontext() if self._prefetcher is None else self._prefetcher.paused()

    def reading(self, storage: Storage, sampler: Any, collate_fn: Callable[[Any], Any] | None) -> Reader:
        """This buffer's way of reading for an ensemble, which draws with one of its samplers.

        Args:
            collate_fn: instead of this buffer's own; None for that.
        """
        if collate_fn is None:
            collate_fn = self._collate_fn or (stack_items if isinstance(storage, ListStorage) else None)
        attach = self._attach if self._attaches else None
        reader = Reader(storage, sampler, self._transform, collate_fn, attach, False, self._track_generations)
        if sampler is self._sampler:
            reader.lock = self._reader.lock  # which of a user's own sampler is the reader's
        return reader

    # ---- parts ----
    @property
    def storage(self) -> Storage:
        return self._storage

    @property
    def sampler(self) -> Any:
        return self._sampler

    @property
    def writer(self) -> Writer:
        return self._writer

    @property
    def generator(self) -> torch.Generator | None:
        """The buffer's own generator; None: draws come from torch's global one."""
        return self._generator

    def _drawn_from(self) -> list[torch.Generator]:
        """The generators that draws change, but for torch's global one."""
        return [] if self._generator is None else [self._generator]

    @property
    def batch_size(self) -> int | None:
        return self._batch_size

    def set_sampler(self, sampler: Any) -> Any:
        """Uses another sampler from now on; returns the old one."""
        return self._replace("_sampler", sampler)

    def set_writer(self, writer: Writer) -> Writer:
        """Uses another writer from now on; returns the old one."""
        old: Writer = self._replace("_writer", writer)
        return old

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Uses another storage from now on; returns the old one."""
        if collate_fn is not None:
            self._collate_fn = collate_fn
        old: Storage = self._replace("_storage", storage)
        return old

    def _replace(self, name: str, part: Any) -> Any:
        with self._undisturbed():
            old = getattr(self, name)
            setattr(self, name, part)
            try:
                self._check_parts()
            except BaseException:
                setattr(self, name, old)
                raise
            if self._prefetcher is not None:
                self._prefetcher.close()
            try:
                self._wire()
            except BaseException:  # the parts do not fit each other
                setattr(self, name, old)
                self._wire()
                raise
        return old

    def append_transform(self: B, transform: Any, *, invert: bool = False) -> B:
        """Adds a transform at the end; with `invert` a callable is applied on writing instead of on reading.

        Raises:
            TypeError: it is no transform, or has an inverse that cannot be called.
        """
        made = as_transform(transform, invert)
        self._check_transform(made)
        with self._undisturbed():
            self._transform.append(made)
        return self

    def insert_transform(self: B, index: int, transform: Any, *, invert: bool = False) -> B:
        """Adds a transform before the one at `index`; errors as `append_transform`."""
        made = as_transform(transform, invert)
        self._check_transform(made)
        with self._undisturbed():
            self._transform.insert(index, made)
        return self

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage saves."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Adds a callable that is applied to what the storage loads."""
        self._storage.register_load_hook(hook)

    # ---- processes ----
    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_reader", "_prefetcher"):
            del state[name]
        # As bytes: a tensor made here would be gone, with its memory, before another process had received it.
        state["_generator"] = None if self._generator is None else state_of(self._generator).numpy().tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["_generator"]
        self.__dict__.update(state)
        # Steps that wait for their future are written by the process that they were given to.
        self._transform.empty()
        if saved is not None:
            self._generator = torch.Generator()
            set_state(self._generator, torch.frombuffer(bytearray(saved), dtype=torch.uint8))
        self._wire()

    def after_fork(self) -> None:
        """In a child: no steps that the parent will write, too."""
        lanes = self._storage.lanes
        if lanes is not None and lanes.locks is not None:
            self._transform.empty()

    def __repr__(self) -> str:
        collate = self._reader.collate_fn
        said = {
            "storage": self._storage,
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": self._batch_size,
            "transform": self._transform,
            "collate_fn": getattr(collate, "__name__", collate),
        }
        inner = ",\n".join(textwrap.indent(f"{k}={v}", "    ") for k, v in said.items())
        return f"{type(self).__name__}(\n{inner})"


def _made(part: Any, kind: type, name: str) -> Any:
    """An instance from an instance or a factory without arguments."""
    if part is None:
        return None
    is_part = isinstance(part, kind) if kind is not object else hasattr(part, "sample") and not isinstance(part, type)
    if is_part:
        return part
    if callable(part):
        return part()
    raise TypeError(f"{name} must be a {kind.__name__} or something that makes one, got a {type(part).__name__}")


def _with_capacity(storage: Storage | None, capacity: int | None) -> Storage:
    if storage is None:
        return ListStorage(_DEFAULT_CAPACITY if capacity is None else capacity)
    if capacity is None or storage.max_size == capacity:
        return storage
    if storage.max_size is None and isinstance(storage, ListStorage):
        storage.limit(capacity)
        return storage
    raise ValueError(f"capacity={capacity}, but the storage has max_size={storage.max_size}; give one of them")


def checked_batch_size(batch_size: Any) -> int | None:
    if batch_size is None:
        return None
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__") or int(batch_size) < 1:
        raise ValueError(f"batch_size must be a positive integer, got {batch_size!r}")
    return int(batch_size)
