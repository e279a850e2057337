"""`DMControlEnv`: tasks of the DeepMind Control Suite, through shimmy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from engram._advice import advised
from engram._packages import packages
from engram.envs.gym import GymEnv


def _modules() -> tuple[Any, Any]:
    """dm_control's suite, and shimmy's wrapper of a task. Raises ImportError where one is missing."""
    with packages("DMControlEnv", "engram[dm-control]", shimmy="shimmy", dm_control="dm_control"):
        from dm_control import suite
        from shimmy.dm_control_compatibility import DmControlCompatibilityV0
    return suite, DmControlCompatibilityV0


class _Tasks:
    """The domains of the suite, each with its tasks, read from the class or an object."""

    def __get__(self, instance: Any, owner: type) -> list[tuple[str, list[str]]]:
        return [(domain, list(tasks)) for domain, tasks in _modules()[0].TASKS_BY_DOMAIN.items()]


@advised
class DMControlEnv(GymEnv):
    """A task of the DeepMind Control Suite; its observations keep their names and are float64 as there.

    Everything else is as in `GymEnv`.

    Args:
        env_name: the domain: "cheetah".
        task_name: the task: "run".
        from_pixels: uint8 `pixels` `[H, W, 3]` instead of the observations; with `pixels_only=False`, beside them.
        frame_skip: repeats each action so many times and adds up the rewards.
        render_kwargs: for shimmy: `{"render_height": 84, "render_width": 84, "camera_id": 0}`.
        task_kwargs: for the task, as `suite.load` takes them: `{"random": seed}`.

    Raises:
        ImportError: shimmy or dm_control is missing: `pip install "engram[dm-control]"`.
    """

    available_envs = _Tasks()  #: pairs of a domain and the list of its tasks
    libname = "dm_control"

    def __init__(
        self,
        env_name: str,
        task_name: str,
        *,
        device: torch.device | str | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        frame_skip: int | None = None,
        render_kwargs: dict[str, Any] | None = None,
        task_kwargs: dict[str, Any] | None = None,
    ) -> None:
        suite, wrapper = _modules()
        self.task_name = task_name
        task = suite.load(env_name, task_name, task_kwargs=task_kwargs)
        env = wrapper(task, render_mode="rgb_array" if from_pixels else None, **(render_kwargs or {}))
        super().__init__(env, device=device, from_pixels=from_pixels, pixels_only=pixels_only, frame_skip=frame_skip)
        self.env_name = env_name

    @property
    def lib(self) -> ModuleType:
        """The module of the suite's tasks."""
        suite: ModuleType = _modules()[0]
        return suite

    def __repr__(self) -> str:
        return f"DMControlEnv(env={self.env_name}, task={self.task_name}, device={self.device})"
