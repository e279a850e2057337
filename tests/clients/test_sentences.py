"""Each sentence of what clients rely on is tried with a few lines of a client's code, in engram and in TorchRL."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch

from clients.packages import SENTENCES, Package, Sentence

for file in sorted((Path(__file__).parent / "sentences").glob("*.py")):
    importlib.import_module(f"clients.sentences.{file.stem}")

ALL = [pytest.param(sentence, id=sentence.lines.__name__) for sentence in SENTENCES]


def test_every_sentence_has_lines_of_its_own():
    assert len({sentence.text for sentence in SENTENCES}) == len({s.lines.__name__ for s in SENTENCES}) == len(ALL)


@pytest.mark.parametrize("package", ["engram", pytest.param("torchrl", marks=pytest.mark.theirs)])
@pytest.mark.parametrize("sentence", ALL)
def test_a_sentence_is_true(sentence: Sentence, package: str, tell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    expected_to_fail = package == "torchrl" and sentence.not_in_torchrl is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            sentence.lines(Package(package))
    except Exception as error:
        why = str(error).strip().splitlines()[:1]
        tell("Sentences", sentence.text, package, f"{type(error).__name__}: {''.join(why)[:80]}")
        if not expected_to_fail:
            raise
    else:
        tell("Sentences", sentence.text, package, "passes")
        assert not expected_to_fail, f"TorchRL does it: take out {sentence.not_in_torchrl!r}"
