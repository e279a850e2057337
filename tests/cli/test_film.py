"""`play` and film strips: the frames of a stored episode, in their order."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from cli.test_command import call
from engram.cli import play, report
from engram.data import LazyMemmapStorage, ReplayBuffer

Image = pytest.importorskip("PIL.Image")


def pixel_store(folder, shape=(12, 10), length=5, count=3, envs=1, capacity=100):
    """Episodes in which frame k of episode e has the grey 40 e + 5 k, brighter by 100 in a second environment."""
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, ndim=min(envs, 2))
    n = length * count
    greys = (torch.arange(n) // length * 40 + torch.arange(n) % length * 5).to(torch.uint8)
    done = (torch.arange(n) % length == length - 1).unsqueeze(-1)
    pixels = greys.reshape(n, *[1] * len(shape)).expand(n, *shape).clone()
    data = TensorDict({"x": torch.zeros(n), "pixels": pixels, "next": {"done": done, "reward": torch.ones(n, 1)}}, [n])
    if envs > 1:
        other = data.clone()
        other["pixels"] += 100
        data = torch.stack([data, other])
    ReplayBuffer(storage=storage).extend(data)
    storage.close()


def greys(file):
    """The grey in the middle of each frame."""
    with Image.open(file) as film:
        found = []
        for k in range(film.n_frames):
            film.seek(k)
            found.append(int(np.asarray(film.convert("L"))[film.height // 2, film.width // 2]))
        return found


@pytest.mark.parametrize("shape", [(12, 10), (1, 12, 10), (3, 12, 10), (12, 10, 3)])
@pytest.mark.parametrize("episode", [0, 1, -1])
def test_a_gif_has_the_frames_of_the_episode_in_their_order(tmp_path, shape, episode):
    pixel_store(tmp_path / "store", shape)
    file = play(tmp_path / "store", tmp_path / "film.gif", episode=episode)
    assert greys(file) == pytest.approx([40 * (episode % 3) + 5 * k for k in range(5)], abs=2)
    with Image.open(file) as film:
        assert film.size == (140, 168) or film.size == (150, 180)  # enlarged by a whole number


def test_a_stack_shows_its_newest_frame(tmp_path):
    storage = LazyMemmapStorage(10, scratch_dir=tmp_path / "store")
    frames = (torch.arange(4)[:, None, None, None] * 40 + torch.arange(4)[None, :, None, None] * 10).to(torch.uint8)
    done = torch.tensor([0, 0, 0, 1]).bool()
    stacks = frames.expand(4, 4, 8, 8).clone()
    ReplayBuffer(storage=storage).extend(TensorDict({"pixels": stacks, "next": {"done": done}}, [4]))
    assert greys(play(tmp_path / "store", tmp_path / "f.gif")) == pytest.approx([30, 70, 110, 150], abs=2)


def test_an_episode_of_one_environment_of_several_is_its_own(tmp_path):
    pixel_store(tmp_path / "store", envs=2)
    assert greys(play(tmp_path / "store", tmp_path / "f.gif", episode=-1)) == pytest.approx(
        [180, 185, 190, 195, 200], abs=2
    )


def test_what_cannot_be_played_is_named(tmp_path):
    pixel_store(tmp_path / "store")
    with pytest.raises(IndexError, match="no episode 3: 3 are stored"):
        play(tmp_path / "store", tmp_path / "f.gif", episode=3)
    with pytest.raises(KeyError, match="those that do: pixels"):
        play(tmp_path / "store", tmp_path / "f.gif", key="x")
    with pytest.raises(ValueError, match=r"\.gif or \.mp4"):
        play(tmp_path / "store", tmp_path / "f.avi")
    with pytest.raises(ValueError, match="fps"):
        play(tmp_path / "store", tmp_path / "f.gif", fps=0)
    assert not (tmp_path / "f.gif").exists()


def test_a_store_without_images_is_told_what_one_is(tmp_path):
    ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "store")).extend({"x": torch.zeros(2, 3)})
    with pytest.raises(KeyError, match=r"no key holds images: uint8 \[H, W\]"):
        play(tmp_path / "store", tmp_path / "f.gif")


@pytest.mark.parametrize("option", ["-o", "--output", "--gif"])
def test_the_command_writes_the_file_that_it_is_given(tmp_path, option):
    pixel_store(tmp_path / "store")
    assert call("play", tmp_path / "store", option, tmp_path / "f.gif").exit_code == 0
    assert len(greys(tmp_path / "f.gif")) == 5


def test_the_command_takes_one_output(tmp_path):
    pixel_store(tmp_path / "store")
    assert call("play", tmp_path / "store", "-o", "a.gif", "--mp4", "b.mp4").exit_code == 2


def test_the_help_names_the_extra_that_an_mp4_needs():
    # Without brackets, which some versions of typer take for markup.
    assert "engram's extra 'video'" in " ".join(call("play", "--help").output.split())


def test_only_a_gif_of_engrams_own_is_replaced(tmp_path):
    pixel_store(tmp_path / "store")
    for _ in range(2):
        play(tmp_path / "store", tmp_path / "f.gif")
    Image.new("L", (8, 8)).save(tmp_path / "theirs.gif")
    before = (tmp_path / "theirs.gif").read_bytes()
    with pytest.raises(FileExistsError, match="GIF that engram made"):
        play(tmp_path / "store", tmp_path / "theirs.gif")
    assert (tmp_path / "theirs.gif").read_bytes() == before


def test_an_mp4_has_as_many_frames_as_the_episode_has_steps(tmp_path):
    imageio = pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    pixel_store(tmp_path / "store")
    file = play(tmp_path / "store", tmp_path / "film.mp4", episode=0)
    with imageio.get_reader(file, format="FFMPEG") as film:
        assert [int(frame[50, 50, 0]) for frame in film] == pytest.approx([0, 5, 10, 15, 20], abs=4)


def test_without_imageio_an_mp4_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "imageio", None)
    pixel_store(tmp_path / "store")
    with pytest.raises(ImportError, match=r"engram\[video\]"):
        play(tmp_path / "store", tmp_path / "film.mp4")


def test_the_command_writes_a_film(tmp_path, monkeypatch):
    pixel_store(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    assert call("play", "store", "--episode", "0").output.strip() == "store.gif"
    assert len(greys(tmp_path / "store.gif")) == 5
    assert call("play", "store", "--episode", "9").exit_code == 2
    assert call("play", "store", "--gif", "a.gif", "--mp4", "a.mp4").exit_code == 2


def test_a_report_has_a_film_strip_and_no_histogram_of_flags(tmp_path):
    pytest.importorskip("matplotlib")
    pixel_store(tmp_path / "store")
    page = report(tmp_path / "store", output=tmp_path / "r.html").read_text()
    assert "Film strip: pixels" in page and "pixels: 5 of the 5 steps of the longest stored episode" in page
    assert 'alt="next.reward"' in page and 'alt="next.done"' not in page
    assert "Draws of process" not in page


def test_a_report_shows_ages_and_priorities_that_a_learner_publishes(tmp_path):
    pytest.importorskip("matplotlib")
    from engram.data import LazyTensorStorage, PrioritizedSampler
    from engram.data.replay_buffers.buffers.publishing import draw_chances
    from engram.store.published import LearnerFile, LearnerStats

    pixel_store(tmp_path / "store")
    rb = ReplayBuffer(storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, 1.0, 1.0), batch_size=2)
    rb.update_priority(rb.extend(torch.arange(20)), torch.rand(20))
    ages, effective, priorities = draw_chances(rb.storage, rb.sampler)
    stats = LearnerStats(1, 0.0, "PrioritizedSampler", 1, 2, 1.0, 1.0, ages, effective, 20, priorities)
    LearnerFile(tmp_path / "store").write(stats)
    page = report(tmp_path / "store", output=tmp_path / "r.html").read_text()
    assert "age of what is drawn" in page and "priorities, as they weigh in draws" in page
