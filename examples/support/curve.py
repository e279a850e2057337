"""The picture of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from support.history import History

_GREEDY, _EXPLORING, _KILL, _QUIET = "#1a9c74", "#7fa3c7", "#d1495b", "#8a8a8a"


def draw(history: History, solved_at: float, path: Path) -> None:
    """Writes the picture."""
    figure, axes = plt.subplots(figsize=(9, 4.8), layout="constrained")
    plot(history, solved_at, figure, axes)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot(history: History, solved_at: float, figure: Any, axes: Any) -> None:
    """Returns over frames, with the kill and the checkpoint that the learner went back to."""
    if history.episodes:
        axes.scatter(
            *zip(*history.episodes, strict=True), s=9, color=_EXPLORING, lw=0, label="episodes while exploring"
        )
    if history.evaluations:
        axes.plot(
            *zip(*history.evaluations, strict=True), color=_GREEDY, lw=2, marker="o", ms=5, label="greedy policy, mean"
        )
    axes.axvline(history.killed_at, color=_KILL, lw=1.5)
    axes.axvspan(history.resumed_from, history.killed_at, color=_KILL, alpha=0.08, lw=0)
    note = f"SIGKILL in an extend, frame {history.killed_at:,}\nrows kept, weights of frame {history.resumed_from:,}"
    axes.annotate(note, (history.killed_at, 1), xycoords=("data", "axes fraction"), ha="right", va="top", color=_KILL,
                  fontsize=9, xytext=(-6, -6), textcoords="offset points")  # fmt: skip
    if solved_at > 0:
        axes.axhline(solved_at, color=_QUIET, lw=1, ls="--")
        axes.annotate(f"learned: {solved_at:g}", (0, solved_at), xycoords=("axes fraction", "data"), ha="left",
                      va="bottom", color=_QUIET, fontsize=9, xytext=(4, 2), textcoords="offset points")  # fmt: skip
    axes.set(xlabel="frames", ylabel="return of an episode", xlim=(0, None), ylim=(0, 585))
    axes.set_title("CartPole-v1: a double DQN on a memory-mapped buffer that was killed on the way", fontsize=11)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
