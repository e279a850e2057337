"""Rolling environments forward that step together, with raw values: tensors are made once a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from engram.collectors.batch_actions import (
    BatchModule,
    BatchRandom,
    BatchSource,
    BatchTensorDicts,
    RandomInstead,
    RandomWhere,
)
from engram.collectors.calls import CallLog, Frames
from engram.collectors.rolled import Rolled
from engram.collectors.trajectories import FrameMarks
from engram.envs.codecs import space_leaves
from engram.envs.engines import Autoreset, VectorEngine, VectorStep
from engram.envs.policies import FLAGS, RandomPolicy, TensorDictPolicy, as_observation_policy

Array = np.ndarray[Any, Any]


class BatchRoller:
    """Does what `TensorDictRoller` does, for a `VectorEngine`, key by key the same.

    A call that only resets an environment (NEXT_STEP) is no frame of it: environments whose episodes are long then have
    more frames than others, and a batch is there when each has its steps. **Frames beyond those open the next batch, in
    their order**; `restart` drops them.
    """

    def __init__(
        self,
        env: Any,
        engine: VectorEngine,
        policy: TensorDictPolicy,
        max_frames_per_traj: int | None,
        marks: FrameMarks,
    ) -> None:
        if max_frames_per_traj is not None and not engine.can_reset_some:
            raise ValueError(
                f"max_frames_per_traj={max_frames_per_traj} cuts episodes one by one, and these environments can only "
                "be reset all together; use a time limit of their own (gymnasium.make_vec(..., "
                f"max_episode_steps={max_frames_per_traj})), or SerialEnv"
            )
        self._engine, self._policy, self._limit, self._marks = engine, policy, max_frames_per_traj, marks
        self._device = env.device
        self.is_random = isinstance(policy, RandomPolicy)
        self._random = BatchRandom(
            policy if isinstance(policy, RandomPolicy) else RandomPolicy(env.action_spec), engine
        )
        self._on_tensordicts = BatchTensorDicts(policy, engine, self._device)
        self._log = CallLog(engine.n, engine.leaves, space_leaves(engine.action, ("action",)))
        self.restart()

    def restart(self) -> None:
        """Every environment is reset before its next step; frames that wait for the next batch are dropped."""
        self._log.clear()
        self._over = np.zeros(self._engine.n, np.bool_)
        self._ages = np.zeros(self._engine.n, np.int64)

    def roll(self, steps: int, random_steps: int) -> Rolled:
        """`[n, steps]` in TED, the first `random_steps` of each environment with random actions."""
        try:
            self._fill(steps, random_steps)
        except BaseException as error:
            return self._cut_short(steps, error)
        try:
            return Rolled(self._assembled(self._log.take(steps), steps))
        except BaseException:
            self.restart()  # half a batch is lost: no trajectory may go on across the gap
            raise

    def _cut_short(self, steps: int, error: BaseException) -> Rolled:
        """What every environment has stepped before an error: no trajectory goes on after it."""
        try:
            try:
                self._log.count()
            except ValueError as earlier:
                error = earlier
            steps = min(steps, int(self._log.waiting.min()))
            if steps == 0:
                raise error
            return Rolled(self._assembled(self._log.take(steps), steps), error)
        finally:
            self.restart()

    def _fill(self, steps: int, random_steps: int) -> None:
        source = self._source()
        if self._log.is_empty:
            self._log.begin(self._engine.reset())
            source.forget(np.ones(self._engine.n, np.bool_))
        waiting = self._log.waiting
        while (missing := steps - int(waiting.min())) > 0:
            if self.is_random:
                self._run(source, missing)
            elif (surely_random := random_steps - int(waiting.max())) > 0:
                self._run(RandomInstead(self._random, source), min(missing, surely_random))
            elif int(waiting.min()) < random_steps:  # some have had their random steps, others not
                self._run(RandomWhere(waiting < random_steps, self._random, source), 1)
            else:
                self._run(source, missing)

    def _source(self) -> BatchSource:
        if self.is_random:
            return self._random
        direct = as_observation_policy(self._policy)  # looked at again for each batch: hooks come and go
        if direct is not None:
            return BatchModule(direct, self._engine)
        return self._on_tensordicts

    def _run(self, source: BatchSource, calls: int) -> None:
        log, step, version = self._log, self._engine.step, self._marks.version
        has_ends = self._engine.autoreset is Autoreset.DISABLED or self._limit is not None
        if self._over.any():  # only now: the last state of a batch must stay, and a restart may come
            self._reset_over(source)
        for left, action in enumerate(source.actions(calls, log), 1 - calls):
            out = step(action)
            log.add(out, version)
            if out.idle is not None:
                source.forget(out.idle)
            elif out.last:
                source.forget(self._mask_of([env for env, _ in out.last]))
            if has_ends and self._ends(out) and left:
                self._reset_over(source)
        log.count()

    def _ends(self, out: VectorStep) -> bool:
        """Takes in which episodes end with this call; says whether environments have to be reset."""
        natural = self._log.last_ends()
        self._over = natural
        if self._limit is not None:
            self._ages += 1 if out.idle is None else ~out.idle
            cut = self._ages >= self._limit
            self._log.cut(cut)
            self._ages[natural | cut] = 0
            self._over = natural | cut if self._engine.autoreset is Autoreset.DISABLED else cut & ~natural
        return bool(np.count_nonzero(self._over))

    def _reset_over(self, source: BatchSource) -> None:
        envs = self._over.copy()
        self._log.restart(envs, self._engine.reset(None if envs.all() else envs))
        self._over[:] = False
        source.forget(envs)

    def _mask_of(self, envs: list[int]) -> Array:
        mask = np.zeros(self._engine.n, np.bool_)
        mask[envs] = True
        return mask

    def _assembled(self, frames: Frames, steps: int) -> TensorDictBase:
        def of_batch(entries: dict[Any, Any]) -> TensorDict:
            return TensorDict(entries, batch_size=shape, device=self._device)

        shape = torch.Size((self._engine.n, steps))
        outcomes = {
            "reward": frames.reward,
            "done": frames.terminated | frames.truncated,
            "terminated": frames.terminated,
            "truncated": frames.truncated,
        }
        marks = self._marks.entries(outcomes["done"][..., 0], shape, frames.versions)
        flags = {key: torch.from_numpy(np.zeros((*shape, 1), dtype=np.bool_)) for key in FLAGS}
        columns = {key: torch.from_numpy(column) for key, column in outcomes.items()}
        following = of_batch({**columns, **frames.after})
        td = of_batch({**flags, "collector": of_batch(marks), "next": following, **frames.before, **frames.action})
        return td if frames.extras is None else frames.extras.update(td)
