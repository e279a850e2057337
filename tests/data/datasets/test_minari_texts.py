"""Texts of Minari datasets, in both of their forms."""

import json

import numpy as np
import pytest

from contracts.each import each
from data.datasets.test_minari_arrow import pa, struct, write
from engram.data import LazyTensorStorage, ReplayBuffer, Text
from engram.data.datasets import iter_minari, read_minari
from engram.errors import DatasetError

h5py = pytest.importorskip("h5py", reason='reading Minari datasets needs h5py: pip install "engram[h5]"')

WORDS = ["go", "größer", "", "x"]
SPACE = {"type": "Text", "max_length": 6, "min_length": 0, "charset": "gorößex"}


def write_hdf5_form(folder, words=WORDS, space=SPACE, kind=None, **options):
    """An episode of 3 steps with texts as observations and as an info."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        episode = file.create_group("episode_0")
        kind = kind or h5py.string_dtype()
        episode.create_dataset("observations/mission", data=words, dtype=kind, **options)
        episode.create_dataset("infos/name", data=WORDS, dtype=h5py.string_dtype())
        episode["actions"], episode["rewards"] = np.arange(3), np.zeros(3)
        episode["terminations"], episode["truncations"] = np.array([0, 0, 1], bool), np.zeros(3, bool)
    said = {"total_episodes": 1, "observation_space": json.dumps({"type": "Dict", "subspaces": {"mission": space}})}
    (folder / "data/metadata.json").write_text(json.dumps(said))
    return folder


def write_arrow_form(folder, words=WORDS, space=SPACE, kind=None):
    columns = {"observations": struct(mission=pa.array(words, kind)), "infos": struct(name=pa.array(WORDS))}
    said = json.dumps({"type": "Dict", "subspaces": {"mission": space}})
    return write(folder, lengths=(3,), columns=columns, observation_space=said)


FORMS = {"hdf5": write_hdf5_form, "arrow": write_arrow_form}


@each("allowed", [1000, "1MB"])  # a few rows at once, or all of them
@each("form", FORMS)
def test_texts_are_read_in_the_width_of_their_space(tmp_path, form, allowed):
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    assert read_minari(FORMS[form](tmp_path / "s"), rb, max_row_bytes=allowed) == 3
    found = rb[:]
    assert found["mission"].shape == (3, 12) and found["info", "name"].shape == (3, 256)
    assert Text(12).decode(found["mission"]) == WORDS[:3] and Text(12).decode(found["next", "mission"]) == WORDS[1:]
    assert Text(256).decode(found["next", "info", "name"]) == WORDS[1:]
    assert Text(12).is_in(found["mission"])


def test_large_strings_of_arrow_and_compressed_ones_of_hdf5_are_read(tmp_path):
    (one,) = iter_minari(write_arrow_form(tmp_path / "a", kind=pa.large_string()))
    (other,) = iter_minari(write_hdf5_form(tmp_path / "h", compression="gzip", chunks=(2,)))
    assert one["mission"].tolist() == other["mission"].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_text_that_is_longer_than_its_space_says_is_named(tmp_path, form):
    folder = FORMS[form](tmp_path / "s", words=["go", "a text of more bytes", "", "x"])
    with pytest.raises(DatasetError, match=r"mission.* is the text 'a text of more bytes', which has 20 bytes"):
        list(iter_minari(folder))


@each("length", [-1, "6", None, 1.5])
@each("form", FORMS)
def test_length_that_is_none_is_passed_over(tmp_path, form, length):
    (episode,) = iter_minari(FORMS[form](tmp_path / "s", space={**SPACE, "max_length": length}))
    assert episode["mission"].shape == (3, 256)


@pytest.mark.parametrize("form", FORMS)
def test_length_beyond_what_a_row_may_take_is_refused(tmp_path, form):
    with pytest.raises(DatasetError, match="max_row_bytes= allows"):
        list(iter_minari(FORMS[form](tmp_path / "s", space={**SPACE, "max_length": 1 << 50})))


def test_strings_that_are_no_utf8_or_missing_are_errors(tmp_path):
    with pytest.raises(DatasetError, match="codec can't decode"):
        list(iter_minari(write_hdf5_form(tmp_path / "h", words=[b"\xff\xfe", b"", b"", b""])))
    with pytest.raises(DatasetError, match=r"has no value in 1 places of 'observations.mission'"):
        list(iter_minari(write_arrow_form(tmp_path / "a", words=["go", None, "", "x"])))
    broken = pa.StringArray.from_buffers(
        4, pa.py_buffer(np.array([0, 2, 1, 2, 4], np.int32).tobytes()), pa.py_buffer(b"goxx")
    )
    with pytest.raises(DatasetError, match="cannot be read"):
        list(iter_minari(write_arrow_form(tmp_path / "b", words=broken)))


def test_strings_that_were_never_written_or_have_two_dimensions_are_errors(tmp_path):
    folder = write_hdf5_form(tmp_path / "s")
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        del file["episode_0/observations/mission"]
        file.create_dataset("episode_0/observations/mission", (1 << 40,), h5py.string_dtype())
    with pytest.raises(DatasetError, match=r"has the shape \[1099511627776\], but 0 bytes in the file"):
        list(iter_minari(folder))
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        del file["episode_0/observations/mission"]
        file.create_dataset(
            "episode_0/observations/mission", data=[["a"], ["b"], ["c"], ["d"]], dtype=h5py.string_dtype()
        )
    with pytest.raises(DatasetError, match="has texts that are not one a step"):
        list(iter_minari(folder))


def test_texts_in_one_episode_and_numbers_in_another_are_an_error(tmp_path):
    folder = write_hdf5_form(tmp_path / "s")
    with h5py.File(folder / "data/main_data.hdf5", "r+") as file:
        file.copy("episode_0", "episode_1")
        del file["episode_1/observations/mission"]
        file["episode_1/observations/mission"] = np.arange(4)
    (folder / "data/metadata.json").write_text("{}")
    with pytest.raises(DatasetError, match=r"episode_1/observations/mission is int64 \[\] a step, but uint8 \[256\]"):
        list(iter_minari(folder))
