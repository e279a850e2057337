"""What the rows of a store that keeps each observation once are made of. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engram.pytree import Key

#: Rows of a lane, the newest ones, that are looked at.
ROWS_LOOKED_AT = 4096
_MUCH = 0.05  # as the share of stacks that are stored whole
_SELDOM = 0.5  # as the share of next observations that are those of a later row
_FEW = 100  # rows, which tell little


class ObservationShares(NamedTuple):
    """What the newest rows of a storage with `compact=` are made of.

    Attributes:
        frames: how many frames each key's observation is a stack of.
        n_steps: how many rows behind a row its next observation is looked for.
        bytes_per_step: of the storage, for each step that it has room for.
        same: the share of rows whose next observation is that of a later row, and takes no memory.
        moved: the share of rows, as at the ends of episodes, whose next observation is theirs and one more frame.
        whole: the share of rows whose next observation is stored whole.
        advice: what would make the rows smaller; None: they are as small as they can be.
    """

    frames: dict[Key, int]
    n_steps: int
    bytes_per_step: float
    same: float
    moved: float
    whole: float
    advice: str | None

    def __str__(self) -> str:
        """In a sentence, with the advice.

        Example:
            >>> print(ObservationShares({"pixels": 4}, 1, 7_225.3, 0.99, 0.01, 0.0, None))
            7,225 bytes a step, 'pixels' in stacks of 4 frames: of next observations 99.0% are those of the row behind,
            1.0% are a frame more, 0.0% are whole
        """
        stacks = [f"{key!r}" + (f" in stacks of {n} frames" if n > 1 else "") for key, n in self.frames.items()]
        behind = "the row behind" if self.n_steps == 1 else f"the row {self.n_steps} rows behind"
        shown = (
            f"{self.bytes_per_step:,.0f} bytes a step, {', '.join(stacks)}: of next observations {self.same:.1%} are "
            f"those of {behind}, {self.moved:.1%} are a frame more, {self.whole:.1%} are whole"
        )
        return shown if self.advice is None else f"{shown}; {self.advice}"

    @classmethod
    def of(
        cls,
        frames: dict[Key, int],
        n_steps: int,
        bytes_per_step: float,
        kinds: tuple[int, int, int, int, int, list[int]],
    ) -> ObservationShares:
        """The shares of rows of these kinds (`Store.observation_kinds`)."""
        rows, same, moved, whole, whole_x, same_of_key = kinds
        n = max(1, rows)
        by_key = [count / n for count in same_of_key]
        is_dear = same / n < _SELDOM or (max(frames.values()) > 1 and max(whole, whole_x) / n > _MUCH)
        advice = _advice(list(frames), by_key, whole_x / n, n_steps) if is_dear and rows >= _FEW else None
        return cls(frames, n_steps, bytes_per_step, same / n, moved / n, whole / n, advice)


def _advice(keys: list[Key], same_of_key: list[float], whole_x: float, n_steps: int) -> str:
    never = [key for key, share in zip(keys, same_of_key, strict=True) if share < _MUCH]
    if never and max(same_of_key) > _SELDOM:
        return (
            f"{never[0]!r} is hardly ever under 'next' what it is in a later row: leave it out of the keys of compact="
        )
    if whole_x > _MUCH:
        return (
            "rows beside each other are of different episodes: write steps of several environments with ndim=2, and "
            "give each process that writes a lane of its own (lanes=)"
        )
    if n_steps == 1:
        return "the next observation is seldom that of the row behind: of n-step rows, say compact=Compact(n_steps=n)"
    return f"the next observation is seldom that {n_steps} rows later: say another n_steps= in compact=Compact(...)"
