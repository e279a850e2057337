"""The settings of collectors are the arguments of their constructors, whichever process the collector is in."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

from contracts.each import each
from engram.collectors import MultiCollector, SyncDataCollector
from engram.collectors.settings import CollectorSettings

DEFAULTS = {field.name: field.default for field in dataclasses.fields(CollectorSettings)}
#: Values of all settings that go together.
GIVEN = {
    "frames_per_batch": 8,
    "total_frames": 16,
    "device": "cpu",
    "storing_device": "cpu",
    "policy_device": "cpu",
    "env_device": "cpu",
    "max_frames_per_traj": 5,
    "init_random_frames": 3,
    "trajs_per_batch": 2,
    "traj_format": "cat",
    "track_policy_version": True,
    "compact_obs": True,
    "compile_policy": {"mode": "default"},
}


def test_each_setting_is_an_argument_of_the_collectors_with_the_same_default():
    for cls, lacks in ((SyncDataCollector, set()), (MultiCollector, {"return_same_td", "track_traj_ids"})):
        arguments = {name: one.default for name, one in inspect.signature(cls.__init__).parameters.items()}
        assert {name: arguments[name] for name in DEFAULTS if name not in lacks} == {
            name: default for name, default in DEFAULTS.items() if name not in lacks
        }, cls
        assert not lacks & set(arguments) and "replay_buffer" in arguments


def test_settings_go_to_another_process_and_become_the_same_arguments():
    settings = CollectorSettings.of(GIVEN)
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert settings.arguments() == GIVEN and CollectorSettings(**settings.arguments()) == settings


@each("unset", [None, 0, -1])
def test_counts_that_stand_for_no_number_are_none(unset):
    settings = CollectorSettings.of(
        {"frames_per_batch": 8, "total_frames": None, "max_frames_per_traj": unset, "init_random_frames": unset}
    )
    assert settings == CollectorSettings(frames_per_batch=8)


def test_a_worker_has_its_share_and_only_steps():
    share = CollectorSettings.of(GIVEN).share(2, None, policy_device="meta", env_device=None)
    assert (share.init_random_frames, share.device, share.policy_device, share.env_device) == (2, None, "meta", None)
    stepping = share.only_steps(32).arguments()
    assert stepping == {
        "frames_per_batch": 32,
        "policy_device": "meta",
        "max_frames_per_traj": 5,
        "init_random_frames": 2,
        "track_policy_version": True,
        "compact_obs": True,
        "compile_policy": {"mode": "default"},
    }
