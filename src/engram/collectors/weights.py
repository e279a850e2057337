"""The policy that collects, and where its weights come from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn


class PolicyWeights:
    """A user's policy, and the copy on another device that collects, if there has to be one.

    `policy` is the user's own object unless its parameters live elsewhere than `device`.
    """

    def __init__(self, original: Any, device: torch.device | None) -> None:
        self._original = original
        self.policy = original
        if device is not None and isinstance(original, nn.Module) and not _lives_on(original, device):
            self.policy = copy.deepcopy(original).to(device)

    def update(self, weights: Any = None) -> None:
        """Copies weights into the collecting policy: the original's, or a state dict or TensorDict of parameters.

        Raises TypeError for a policy without weights.
        """
        if weights is None and self.policy is self._original:
            return
        if not isinstance(self.policy, nn.Module):
            raise TypeError(f"the policy is a {type(self.policy).__name__} and has no weights; give an nn.Module")
        self.policy.load_state_dict(self._original.state_dict() if weights is None else _state_dict(weights))

    def state_dict(self) -> dict[str, Any] | None:
        """The collecting policy's state; None if it has none."""
        return self.policy.state_dict() if isinstance(self.policy, nn.Module) else None


def _lives_on(module: nn.Module, device: torch.device) -> bool:
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return all(p.type == device.type and device.index in (None, p.index) for p in places)


def _state_dict(weights: Any) -> Mapping[str, Any]:
    if isinstance(weights, TensorDictBase):
        return {key: value.detach() for key, value in weights.flatten_keys(".").items()}
    if isinstance(weights, nn.Module):
        return weights.state_dict()
    return weights  # type: ignore[no-any-return]
