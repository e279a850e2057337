"""What docs/architecture.md says of parts of one's own is true: its examples pass their contracts."""

import re
from pathlib import Path

import pytest

import engram.testing
from contracts.each import each
from contracts.programs import Program, finished
from engram.data import Sampler, Storage, StorageCheckpointerBase, Writer
from engram.envs import EnvBase

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
PARTS = {
    "sampler": Sampler,
    "writer": Writer,
    "environment": EnvBase,
    "storage": Storage,
    "checkpointer": StorageCheckpointerBase,
}


def row(part: str) -> list[str]:
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {part} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def must_define(base: type) -> set[str]:
    """The methods without which a child of a base cannot be made."""
    abstract = getattr(base, "__abstractmethods__", None)
    if base is StorageCheckpointerBase:  # either two of its methods or two others
        with pytest.raises(TypeError, match="has to define") as caught:
            type("Bare", (base,), {})()
        return set(re.findall(r"\b(dumps|loads|plan_\w+)", str(caught.value)))
    if abstract is None:  # a Storage, whose children choose between two forms: its constructor looks
        with pytest.raises(TypeError, match="Can't instantiate abstract class") as caught:
            type("Bare", (base,), {})(10)
        abstract = re.findall(r"\w+", str(caught.value).split("it has no ")[1])
    return set(abstract)


@each("part", PARTS)
def test_the_methods_that_a_part_must_define_are_the_abstract_ones(part: str) -> None:
    assert set(re.findall(r"`(\w+)`", row(part)[2])) == must_define(PARTS[part])


@each("part", ["sampler", "writer", "transform", "environment", "storage"])
def test_the_contract_of_a_part_is_shipped(part: str) -> None:
    assert row(part)[3].strip("`") in engram.testing.__all__


@pytest.mark.deep
def test_the_examples_pass_their_contracts(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "test_examples.py"
    file.write_text("\n\n".join(examples))
    main = tmp_path / "main.py"
    main.write_text("import pytest, sys\nsys.exit(pytest.main(sys.argv[1:]))\n")
    done = finished(Program(main, "-q", "-p", "no:cacheprovider", file, cwd=tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(examples) == 3


def test_the_files_and_classes_that_the_page_names_exist() -> None:
    root, repository = Path(engram.testing.__file__).parents[1], Path(__file__).parents[2]
    files = set(re.findall(r"`([\w/]+\.(?:py|[hc]pp))`", PAGE))
    places = (root, repository / "src" / "native", repository)
    missing = {name for name in files if not any((place / name).exists() for place in places)}
    folders = (root, repository / "src" / "native", repository / "tests")
    code = "\n".join(
        file.read_text() for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".hpp", ".cpp")
    )
    names = set(re.findall(r"`([A-Z][a-z]\w+)`", PAGE))
    known = set(re.findall(r"\bclass (\w+)", code))
    known |= {name for line in re.findall(r"\bimport ([^\n]*)", code) for name in re.findall(r"\w+", line)}
    missing |= names - known
    assert len(files) > 15 and len(names) > 15 and not missing
