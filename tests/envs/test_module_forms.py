"""How a module may be called is found once, and found again after a change of it."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from contracts.each import each
from engram.envs import policies
from engram.envs.policies import CallablePolicy, as_observation_policy, module_keys


def linear(source="observation", target="action"):
    return TensorDictModule(nn.Sequential(nn.Linear(2, 2)), [source], [target])


def sequence():
    return TensorDictSequential(linear(target="hidden"), linear(source="hidden"))


def hook(module):
    module.register_forward_hook(lambda module, args, output: None)


CHANGES = {
    "a hook": hook,
    "a hook of a part": lambda module: hook(module.module[0]),
    "a forward of its own": lambda module: setattr(module.module[0], "forward", lambda td: td),
    "another part": lambda module: module.module.__setitem__(0, linear(target="hidden")),
    "one more part": lambda module: module.module.append(linear(target="more")),
    "other keys": lambda module: setattr(module.module[1], "out_keys", ["other"]),
    "keys that were changed in place": lambda module: module.module[1].in_keys.append("more"),
    "another class": lambda module: setattr(module.module[0], "__class__", type("Own", (TensorDictModule,), {})),
    "a module below": lambda module: module.module[0].module.append(linear()),
}


@each("change", CHANGES.values())
def test_forms_are_found_again_after_a_change(change):
    policy = CallablePolicy(sequence())
    before = policy.forms()
    assert policy.forms() is before
    change(policy.function)
    assert policy.forms() is not before
    assert policy.forms() is policy.forms()


@each(
    "change",
    [
        lambda module: module.eval(),
        lambda module: module.load_state_dict(sequence().state_dict()),
        lambda module: module.zero_grad(),
        lambda module: [parameter.data.add_(1) for parameter in module.parameters()],
    ],
)
def test_what_changes_no_form_leaves_them(change):
    policy = CallablePolicy(sequence())
    before = policy.forms()
    change(policy.function)
    assert policy.forms() is before


def test_a_hook_is_called_from_the_next_batch_on_and_no_more_when_it_is_gone():
    module, seen = linear(), []
    policy = CallablePolicy(module)
    td = TensorDict({"observation": torch.zeros(2)})
    policy.prepare()
    policy(td)
    handle = module.register_forward_hook(lambda module, args, output: seen.append(1))
    assert as_observation_policy(policy) is None and module_keys(policy) is None
    policy.prepare()
    policy(td)
    handle.remove()
    assert as_observation_policy(policy) is not None and module_keys(policy) is not None
    policy.prepare()
    policy(td)
    assert seen == [1]


def test_attributes_that_are_not_simply_equal_have_the_forms_found_again():
    policy = CallablePolicy(sequence())
    policy.function.values = [torch.zeros(3)]
    before = policy.forms()
    policy.function.values = [torch.zeros(3)]
    assert policy.forms() is not before


def test_a_long_list_of_the_users_own_is_not_copied(monkeypatch):
    policy = CallablePolicy(sequence())
    policy.function.history = list(range(1000))
    monkeypatch.setattr(policies, "copy", lambda value: pytest.fail("copied") if len(value) > 100 else value.copy())
    before = policy.forms()
    policy.function.history.append(1)
    assert policy.forms() is before
