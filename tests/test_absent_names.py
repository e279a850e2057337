"""Names that TorchRL's modules have and engram's do not: importing one says where it is, or what to use instead."""

import importlib
import re

import pytest

from contracts.each import each
from engram._advice import NAMES

LATER = [
    "ConsumingSampler", "HERReplayBuffer", "HindsightStrategy", "OfflineToOnlineReplayBuffer", "PromptGroupSampler",
    "SampleUnit", "Sequence", "StalenessAwareSampler", "Transition", "query",
]  # fmt: skip
BELOW = {
    "engram.data": ["engram.data.replay_buffers", "engram.data.replay_buffers.samplers", "engram.data.datasets"],
    "engram.envs": ["engram.envs.transforms", "engram.envs.utils"],
    "engram.collectors": [],
}


@each("name", LATER)
@each("module", ["engram.data", "engram.data.replay_buffers"])
def test_importing_a_name_of_a_later_release_says_so(module, name):
    with pytest.raises(ImportError, match=rf"{module} has no {name}: a later release has it; until then \w+"):
        exec(f"from {module} import {name}", {})


@each("module", NAMES)
def test_every_name_with_advice_is_an_import_error_that_gives_it(module):
    for place in (module, *BELOW[module]):
        for name, advice in NAMES[module].items():
            with pytest.raises(ImportError) as raised:
                exec(f"from {place} import {name}", {})
            assert str(raised.value) == f"{place} has no {name}: {advice}"


@each("module", NAMES)
def test_a_look_for_a_name_with_advice_finds_nothing(module):
    for place in (module, *BELOW[module]):
        found = importlib.import_module(place)
        for name, advice in NAMES[module].items():
            assert not hasattr(found, name) and getattr(found, name, None) is None
            with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}: {advice}")):
                getattr(found, name)


@each("statement", ["import engram.data as data\ndata.query", "from engram.data import *\nquery"])
def test_a_program_that_reads_a_missing_name_does_not_import_it(statement):
    with pytest.raises((AttributeError, NameError)):
        exec(statement, {})


def test_a_name_that_stays_torchrls_is_imported_from_there():
    with pytest.raises(ImportError, match=r"stays TorchRL's.* from torchrl\.envs import Jumanji"):
        from engram.envs import JumanjiEnv  # noqa: F401
    with pytest.raises(ImportError, match=r"from torchrl\.data import TensorDictTokenizer"):
        from engram.data import TensorDictTokenizer  # noqa: F401


@each("module", ["engram.data", "engram.data.replay_buffers", "engram.envs", "engram.collectors"])
def test_an_unknown_name_is_an_attribute_error(module):
    found = importlib.import_module(module)
    assert not hasattr(found, "Bufer")
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Bufer'"):
        found.Bufer  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Bufer'"):
        exec(f"from {module} import Bufer", {})


@each(
    "module, name, meant",
    [
        ("engram.data", "ReplayBuffers", "ReplayBuffer"),
        ("engram.envs", "GymEnvs", "GymEnv"),
        ("engram.envs.transforms", "StepCount", "StepCounter"),
        ("engram.collectors", "SyncDataColector", "SyncDataCollector"),
    ],
)
def test_importing_a_mistyped_name_says_which_may_be_meant(module, name, meant):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}': did you mean '{meant}'"):
        exec(f"from {module} import {name}", {})
