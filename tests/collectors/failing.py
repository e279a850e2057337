"""Environments that fail when they are told to."""

from engram.envs import GymEnv


def cartpole():
    return GymEnv("CartPole-v1")


class Fails(GymEnv):
    """Does something else at its nth step."""

    def __init__(self, n, what):
        super().__init__("CartPole-v1")
        self._left, self._what = n, what

    def engines(self):
        return None

    def _step(self, td):
        self._left -= 1
        if self._left == 0:
            self._what()
        return super()._step(td)


def raises():
    raise ArithmeticError("the simulator broke")
