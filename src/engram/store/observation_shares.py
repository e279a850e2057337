"""What the rows of a store that keeps each observation once are made of. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import engram._native as _native
    from engram.pytree import Key

#: Rows of a lane, the newest ones, that are looked at.
ROWS_LOOKED_AT = 4096
_MUCH = 0.05  # as the share of stacks that are stored whole
_SELDOM = 0.5  # as the share of next observations that are those of a later row
_FEW = 100  # rows, which tell little
#: Rows of all lanes, and how far behind each of them, that are searched for what follows it, where few are found.
_SEARCHED, _FURTHEST = 512, 256
_LEAST_SEARCHED = 64  # of each lane
_LEAST = 32  # rows that tell a share


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
        shown = (
            f"{self.bytes_per_step:,.0f} bytes a step, {', '.join(stacks)}: of next observations {self.same:.1%} are "
            f"those of {_row_behind(self.n_steps)}, {self.moved:.1%} are a frame more, {self.whole:.1%} are whole"
        )
        return shown if self.advice is None else f"{shown}; {self.advice}"

    @classmethod
    def of(cls, store: _native.Store, frames: dict[Key, int], n_steps: int, bytes_per_step: float) -> ObservationShares:
        """The shares of the newest rows of a store."""
        rows, same, moved, whole, whole_x, same_of_key = store.observation_kinds(ROWS_LOOKED_AT)
        n = max(1, rows)
        is_dear = same / n < _SELDOM or (max(frames.values()) > 1 and max(whole, whole_x) / n > _MUCH)
        advice = None
        if is_dear and rows >= _FEW:
            by_key = [count / n for count in same_of_key]
            advice = _advice_of_keys(list(frames), by_key) or _advice_of_order(store, n_steps, whole_x / n)
        return cls(frames, n_steps, bytes_per_step, same / n, moved / n, whole / n, advice)


def _row_behind(distance: int) -> str:
    return "the row behind" if distance == 1 else f"the row {distance} rows behind"


def _advice_of_keys(keys: list[Key], same_of_key: list[float]) -> str | None:
    """The key that never agrees, beside others that do."""
    never = [key for key, share in zip(keys, same_of_key, strict=True) if share < _MUCH]
    if never and max(same_of_key) > _SELDOM:
        return (
            f"{never[0]!r} is hardly ever under 'next' what it is in a later row: leave it out of the keys of compact="
        )
    return None


def _advice_of_order(store: _native.Store, n_steps: int, whole_x: float) -> str | None:
    """Where next observations are, if not where they are looked for; None: in no row.

    As where episodes are short: their last n rows have a next observation with which no row begins, and stacks with
    which an episode begins may be whole.
    """
    most = max(_SEARCHED // store.lanes, _LEAST_SEARCHED)
    looked, agreed = store.observation_distances(most, _FURTHEST)
    shares = {k + 1: count / n for k, (n, count) in enumerate(zip(looked, agreed, strict=True)) if n >= _LEAST}
    now = shares.pop(n_steps, 0.0)
    elsewhere = sum(shares.values())
    if whole_x > _SELDOM or min(whole_x, elsewhere) > _MUCH:
        return (
            "rows beside each other are of different episodes: write steps of several environments with ndim=2, and "
            "give each process that writes a lane of its own (lanes=)"
        )
    share, best = max(((share, distance) for distance, share in shares.items()), default=(0.0, 1))
    if share < now + _MUCH:
        return None
    advice = f"{share:.0%} of next observations are those of {_row_behind(best)}: say compact=Compact(n_steps={best})"
    return advice if best == 1 else f"{advice}, or, of {best} environments beside each other, write them with ndim=2"
