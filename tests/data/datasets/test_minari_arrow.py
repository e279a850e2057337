"""Minari datasets in Arrow's form, in."""

import json

import numpy as np
import pytest

from contracts.each import each
from engram.cli import info
from engram.data import LazyTensorStorage, ReplayBuffer
from engram.data.datasets import MinariExperienceReplay, iter_minari, read_minari
from engram.errors import DatasetError

pa = pytest.importorskip("pyarrow", reason='Parquet needs pyarrow: pip install "engram[parquet]"')

SPACE = {
    "type": "Dict",
    "subspaces": {
        "grid": {"type": "Box", "dtype": "float32", "shape": [2, 2]},
        "pair": {"type": "Tuple", "subspaces": [{"type": "Discrete"}, {"type": "MultiBinary", "n": 3}]},
    },
}


def write(folder, lengths=(3, 1, 2), columns=None, **metadata):
    """A dataset as Minari 0.5.4 writes it: a file an episode, with one row more than the episode has steps."""
    for number, steps in enumerate(lengths):
        rows = steps + 1
        grid = np.arange(4 * rows, dtype=np.float32) + 100 * number
        pair = {"0": np.arange(rows), "1": pa.FixedSizeListArray.from_arrays(np.zeros(3 * rows, np.int8), 3)}
        x = pa.field("x", pa.list_(pa.float64(), 1), metadata={"shape": ""})
        infos = [pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows) * 1.0), type=x.type)]
        table = {
            "observations": struct(grid=pa.FixedSizeListArray.from_arrays(grid, 4), pair=struct(**pair)),
            "actions": pa.array([*range(steps), 0]),
            "rewards": pa.array([*(t + 0.5 for t in range(steps)), 0.0]),
            "terminations": pa.array([False] * (steps - 1) + [number == 0, False]),
            "truncations": pa.array([False] * (steps - 1) + [number != 0, False]),
            "infos": pa.StructArray.from_arrays(infos, fields=[x]),
        } | (columns or {})
        place = folder / "data" / str(number)
        place.mkdir(parents=True)
        batch = pa.record_batch({name: values for name, values in table.items() if values is not None})
        with pa.ipc.new_file(str(place / "part-0.arrow"), batch.schema) as file:
            file.write(batch)
    said = {
        "data_format": "arrow", "total_episodes": len(lengths), "total_steps": sum(lengths),
        "observation_space": json.dumps(SPACE), "action_space": json.dumps({"type": "Discrete"}), **metadata,
    }  # fmt: skip
    (folder / "data/metadata.json").write_text(json.dumps(said))
    return folder


def struct(**fields):
    return pa.StructArray.from_arrays(
        [pa.array(v) if isinstance(v, np.ndarray) else v for v in fields.values()], [*fields]
    )


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_episodes_are_read_with_their_spaces(tmp_path, monkeypatch, block):
    monkeypatch.setattr("engram.datasets.episodes.BLOCK_BYTES", block)
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    assert read_minari(write(tmp_path), rb) == 6
    found = rb[:]
    assert found["grid"].shape == (6, 2, 2) and found["pair", "1"].shape == (6, 3)
    assert found["grid"][:, 0, 0].tolist() == [0, 4, 8, 100, 200, 204]
    assert found["next", "grid"][:, 0, 0].tolist() == [4, 8, 12, 104, 204, 208]
    assert found["action"].tolist() == [0, 1, 2, 0, 0, 1]
    assert found["next", "reward"].tolist() == [[0.5], [1.5], [2.5], [0.5], [0.5], [1.5]]
    assert found["next", "terminated"].flatten().tolist() == [False, False, True, False, False, False]
    assert found["next", "truncated"].flatten().tolist() == [False, False, False, True, False, True]
    assert found["next", "info", "x"].tolist() == [1, 2, 3, 1, 1, 2]
    assert found["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 2, 2]


def test_dataset_is_a_buffer_and_is_described(tmp_path):
    folder = write(tmp_path)
    assert len(MinariExperienceReplay("arrow-v0", root=folder, download=False)) == 6
    assert [len(episode) for episode in iter_minari(folder / "data", infos=False)] == [3, 1, 2]
    assert (info(folder).kind, info(folder).rows) == ("Minari dataset", 6)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"rewards": None}, r"0/part-0\.arrow: has no column 'rewards'"),
        ({"actions": pa.array([[1], [1, 2]])}, r"has 'actions' as list<.*; engram reads texts.*exclude=\['action'\]"),
        ({"actions": pa.array([None, 1])}, r"has no value in 1 places"),
    ],
)
def test_columns_that_are_no_numbers_are_named(tmp_path, columns, said):
    with pytest.raises(DatasetError, match=said):
        list(iter_minari(write(tmp_path, lengths=(1,), columns=columns)))


def test_files_that_are_damaged_or_differ_are_named(tmp_path):
    folder = write(tmp_path)
    (folder / "data/1/part-0.arrow").write_bytes(b"ARROW1\0\0 nothing")
    with pytest.raises(DatasetError, match=r"1/part-0\.arrow: cannot be read"):
        list(iter_minari(folder))
    with pytest.raises(DatasetError, match=r"has 3 episodes, metadata\.json says 4"):
        list(iter_minari(write(tmp_path / "other", total_episodes=4)))
    with pytest.raises(DatasetError, match=r"max_row_bytes= allows 8"):
        list(iter_minari(write(tmp_path / "large"), max_row_bytes=8))


def test_values_keep_the_shapes_of_multi_discrete_and_multi_binary_spaces(tmp_path):
    grid = pa.FixedSizeListArray.from_arrays(np.arange(8), 4)
    folder = write(
        tmp_path, lengths=(1,), columns={"observations": struct(a=grid, b=grid)},
        observation_space=json.dumps({"type": "Dict", "subspaces": {
            "a": {"type": "MultiDiscrete", "nvec": [[9, 9], [9, 9]]}, "b": {"type": "MultiBinary", "n": [1, 4]}
        }}),
    )  # fmt: skip
    (episode,) = iter_minari(folder)
    assert episode["a"].tolist() == [[[0, 1], [2, 3]]] and episode["b"].shape == (1, 1, 4)


@each(
    "space",
    [{"shape": "x"}, {"shape": [-2, -2]}, {"shape": ["a"]}, {"type": "MultiDiscrete", "nvec": [[1], [1, 2]]}, 3],
)
def test_shapes_that_are_none_are_passed_over(tmp_path, space):
    grid = pa.FixedSizeListArray.from_arrays(np.arange(8), 4)
    folder = write(tmp_path, lengths=(1,), columns={"observations": grid}, observation_space=json.dumps(space))
    (episode,) = iter_minari(folder)
    assert episode["observation"].tolist() == [[0, 1, 2, 3]]


def test_struct_without_a_value_is_an_error(tmp_path):
    pair = pa.StructArray.from_arrays([pa.array([1, 2])], ["x"], mask=pa.array([False, True]))
    with pytest.raises(DatasetError, match="has no value in 1 places of 'x'"):
        list(iter_minari(write(tmp_path, lengths=(1,), columns={"observations": pair})))


def test_wrong_bytes_anywhere_in_an_arrow_file_are_errors_of_the_dataset(tmp_path):
    file = write(tmp_path, lengths=(1,)) / "data/0/part-0.arrow"
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for at in rng.integers(0, len(whole) // 4, 150) * 4:
        file.write_bytes(whole[:at] + bytes([255, 255, 255, 127]) + whole[at + 4 :])
        try:
            list(iter_minari(tmp_path))
        except DatasetError:
            continue
