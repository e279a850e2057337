"""Texts of files and users in errors, warnings and logs hold nothing that a terminal acts on."""

import functools
import logging
import pickle
import traceback
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from contracts.each import each
from data.datasets.support import steps
from engram._text import log, visible, visible_lines
from engram.collectors import SyncDataCollector
from engram.data import (
    Bounded,
    Categorical,
    Composite,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from engram.data.datasets import iter_hdf5, iter_minari, iter_parquet, read_parquet, write_hdf5, write_minari
from engram.envs import GymEnv, transforms
from engram.errors import (
    CheckpointError,
    CheckpointMisfitError,
    CorruptCheckpointError,
    DatasetError,
    EngramError,
    ShardUnavailableError,
    StorageError,
    WorkerError,
)

EVIL = "k\x1b[2J\x1b]0;title\x07\u202e\u2028\x9b31m\x7f\r\b\udcff"
FILE = EVIL.replace("\udcff", "")


def acting(text: str) -> list[str]:
    """The characters of a text on which a terminal acts; lines and tabs apart."""
    return [c for c in text if not c.isprintable() and c not in "\n\t"]


# ---- the function ----
def test_a_printable_text_is_as_it_was():
    for text in ("", "reward", "naïve Übung 次の報酬 🙂", "a b"):
        assert visible(text) == text and visible_lines(text) == text


@each(
    "character",
    [*map(chr, (*range(32), *range(0x7F, 0xA0))), *"\u2028\u2029\u061c\u200b\u200e\u200f\ufeff\ud800",
     *map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))],
)  # fmt: skip
def test_what_a_terminal_acts_on_is_shown_as_its_escape(character):
    shown = visible(f"a{character}b")
    assert shown.isprintable() and shown.startswith("a\\") and shown.endswith("b")
    assert not acting(visible_lines(f"a{character}b"))
    assert (visible_lines("a\nb") == "a\nb") and visible("a\nb") == "a\\nb"


# ---- errors ----
@each("error",
    [
        EngramError(EVIL), StorageError(f"{EVIL}\nengram: all is well"), CheckpointError(EVIL, EVIL),
        CorruptCheckpointError(EVIL, EVIL, EVIL, EVIL), CheckpointMisfitError(EVIL, [EVIL], EVIL),
        DatasetError(EVIL, EVIL, 3), WorkerError(EVIL, EVIL), WorkerError(EVIL, reason=EVIL),
        ShardUnavailableError(EVIL),
    ])  # fmt: skip
def test_the_text_of_an_error_acts_on_no_terminal(error):
    for one in (error, pickle.loads(pickle.dumps(error.with_traceback(None)))):
        assert "\\x1b[2J" in str(one) and not acting(str(one))
        assert not acting("".join(traceback.format_exception_only(one)))
    if not isinstance(error, WorkerError | ShardUnavailableError):
        assert "\n" not in str(error)
    assert any(EVIL in str(part) for part in error.args)  # as it was, for programs


def test_the_traceback_of_a_worker_keeps_its_lines():
    assert "\n  File" in str(WorkerError("worker 1", "Traceback\n  File x\n"))


# ---- logs ----
def test_records_of_the_logger_act_on_no_terminal(caplog):
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("%s of %d\n%s", EVIL, 3, "forged")
    assert "\\x1b[2J" in caplog.text and not acting(caplog.text)
    assert caplog.messages[0].endswith("of 3\\nforged") and "\nValueError: k\\x1b" in caplog.text


def test_the_logger_is_the_one_that_users_know():
    assert log is logging.getLogger("engram")


# ---- what the library raises and warns ----
def rows(n=10, **more):
    done = torch.zeros(n, 1, dtype=torch.bool)
    return TensorDict({EVIL: torch.arange(n), "next": {"done": done, "reward": torch.ones(n, 1)}, **more}, [n])


def buffer(storage=None, **parts):
    rb = TensorDictReplayBuffer(storage=storage or LazyTensorStorage(20), batch_size=4, **parts)
    rb.extend(rows())
    return rb


class Refusing(gymnasium.Env):
    """An environment whose observation is not what its space says, under a hostile key."""

    observation_space = gymnasium.spaces.Dict({EVIL: gymnasium.spaces.Box(-1, 1, (2,), np.float32)})
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, observation):
        self._observation = observation

    def reset(self, *, seed=None, options=None):
        return self._observation, {}

    def step(self, action):
        return self._observation, 0.0, False, False, {}


def refusing(observation):
    make = functools.partial(GymEnv, Refusing(observation))
    return list(SyncDataCollector(make, None, frames_per_batch=4, total_frames=4))


def written(path, text="x"):
    """A file with a text."""
    path.write_text(text)
    return path


def saved(path):
    buffer().dumps(path)
    return path


def plain():
    return ReplayBuffer(storage=LazyTensorStorage(9))


ROWS = {
    "another dtype": lambda: buffer().extend(rows().set(EVIL, torch.zeros(10))),
    "another shape": lambda: buffer().extend(rows().set(EVIL, torch.zeros(10, 3, dtype=torch.int64))),
    "a key that is missing": lambda: buffer().extend(rows().exclude(EVIL)),
    "a key that is new": lambda: buffer().extend(rows(**{EVIL + "2": torch.zeros(10)})),
    "texts": lambda: plain().extend({EVIL: ["a", "b"]}),
    "objects": lambda: plain().extend({EVIL: object()}),
    "another length": lambda: plain().extend({EVIL: torch.ones(2), "b": torch.ones(3)}),
    "a masked array": lambda: plain().extend({EVIL: np.ma.masked_array([1, 2])}),
    "a trajectory key": lambda: buffer(sampler=SliceSampler(slice_len=2, traj_key=EVIL + "x")).sample(),
    "an end key": lambda: buffer(sampler=SliceSampler(slice_len=2, end_key=EVIL + "x")).sample(),
    "a key of a spec": lambda: Composite({EVIL: Categorical(2)})[EVIL + "x"],
    "an entry of a spec": lambda: Composite({EVIL: 3}),
    "a value of a spec": lambda: Composite({EVIL: Bounded(0, 1, (2,))}).encode({EVIL: [5.0, 5.0]}),
    "a renamed key": lambda: transforms.RenameTransform([EVIL + "x"], ["b"])(rows()),
    "a key of no image": lambda: transforms.ToTensorImage(in_keys=[EVIL])(rows()),
    "frames of a key": lambda: transforms.CatFrames(3, -1, in_keys=[EVIL + "x"])(rows()),
    "an observation without its key": lambda: refusing({}),
    "an observation of another shape": lambda: refusing({EVIL: np.zeros(3, np.float32)}),
    "an observation of another kind": lambda: refusing({EVIL: "text"}),
}
FILES = {
    "no checkpoint": lambda path: buffer().loads(path),
    "no store": ReplayBuffer.open,
    "a checkpoint that is a file": lambda path: buffer().loads(written(path)),
    "a store over a file": lambda path: LazyMemmapStorage(9, scratch_dir=written(path)).set(0, torch.ones(1)),
    "a save over a file": lambda path: buffer().dumps(written(path)),
    "a checkpoint of other keys": lambda path: other().loads(saved(path)),
    "a checkpoint of another storage": lambda path: ReplayBuffer(storage=ListStorage(9)).loads(saved(path)),
    "a snapshot that is not there": lambda path: buffer().loads(saved(path), snapshot=FILE),
    "a damaged checkpoint": lambda path: buffer().loads(written(saved(path) / "CURRENT", FILE).parent),
    "no Parquet file": lambda path: next(iter_parquet(written(path))),
    "no HDF5 file": lambda path: next(iter_hdf5(written(path))),
    "no Minari dataset": lambda path: next(iter_minari(path)),
    "a column that is not there": lambda path: next(iter_parquet(foreign(path, {FILE: [1]}), columns=[FILE + "x"])),
    "a column of texts": lambda path: next(iter_parquet(foreign(path, {FILE: ["a", "b"]}))),
    "columns that are one key": lambda path: next(iter_parquet(foreign(path, {FILE: [1], f"{FILE}.x": [1]}))),
    "a file larger than the buffer": lambda path: read_parquet(foreign(path, {"n": [*range(20)]}), plain()),
    "keys without a place": lambda path: write_hdf5(flat(), path),
    "keys without a place in Minari": lambda path: write_minari(flat(), path),
    "something at the target": lambda path: write_hdf5(flat(), written(path)),
}


def other():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    rb.extend(TensorDict({FILE + "other": torch.arange(10.0)}, [10]))
    return rb


def flat():
    return rows().rename_key_(EVIL, FILE)


def foreign(path, columns):
    """A Parquet file that another library wrote."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path)
    return path


def texts_of(call) -> str:
    """The texts of the error and of the warnings that a call causes; fails where there are none."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        texts = []
        try:
            call()
        except Exception as error:
            while error is not None:
                texts += traceback.format_exception_only(error)
                error = error.__cause__
    texts += [str(one.message) for one in warned]
    assert texts
    return "".join(texts)


@each("case", ROWS)
def test_errors_that_name_keys_act_on_no_terminal(case):
    assert not acting(texts_of(ROWS[case]))


@each("case", FILES)
def test_errors_and_warnings_that_name_files_act_on_no_terminal(case, tmp_path):
    assert not acting(texts_of(lambda: FILES[case](tmp_path / FILE)))


def test_a_hook_whose_name_holds_escape_sequences_is_named_visibly(tmp_path):
    class Nothing:
        def __repr__(self):
            return EVIL

        def __call__(self, rows):
            return None

    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(torch.arange(3))
    rb.register_save_hook(Nothing())
    with pytest.raises(TypeError, match="returned None") as raised:
        rb.dumps(tmp_path / "saved")
    assert not acting(str(raised.value))


def test_what_keeps_a_folder_from_being_replaced_is_named_visibly(tmp_path):
    write_minari(steps([3]), tmp_path / "set")
    (tmp_path / "set" / FILE).touch()
    with pytest.raises(FileExistsError, match="is not part of it") as raised:
        write_minari(steps([3]), tmp_path / "set", overwrite=True)
    assert not acting(str(raised.value))
