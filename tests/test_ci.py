"""`.ci/run`: a fault of any part fails it, nothing keeps running, and only unchanged parts are skipped."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.waiting import comes, is_gone
from docs.pages import pages

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ci():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "packaging"))
        patch.delitem(sys.modules, "environment", raising=False)
        yield importlib.import_module("ci")
        for name in ("ci", "environment"):
            sys.modules.pop(name, None)


@pytest.fixture
def clone(tmp_path):
    root = tmp_path / "clone"
    for name in (".ci/run", "Makefile", "native.mk", "constraints.txt", "docs/page.md", "src/code.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("build/\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    commit(root)
    return root


def commit(root):
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for command in (["add", "-A"], [*who, "commit", "-q", "--allow-empty", "-m", "a commit"]):
        subprocess.run(["git", *command], cwd=root, check=True)


@pytest.fixture
def run(ci, clone, tmp_path):
    """`run(part, ...)` runs these parts, and gives each part's outcome in a word."""

    def start(*parts, on="this machine", everything=False, whole=False):
        it = ci.Run(parts, clone, tmp_path / "kept", on, everything, whole)
        whole = it()
        words = {name: outcome.word for name, outcome in it.outcomes.items()}
        assert whole == (set(words.values()) <= {"passed", "skipped"})
        return words

    return start


def shell(ci, name, text, needs=(), sees=(), alone=False):
    return ci.Part(name, ("sh", "-c", text), needs, sees, alone)


def test_failed_part_stops_no_other_part_and_its_last_lines_are_shown_at_the_end(ci, run, capsys):
    words = run(
        shell(ci, "bad", "echo the fault; exit 3"),
        shell(ci, "after", "echo never", needs=("bad",)),
        shell(ci, "good", "echo fine"),
    )
    assert words == {"bad": "failed", "after": "not run", "good": "passed"}
    shown = capsys.readouterr().out
    assert "never" not in shown and "fine" in shown
    table = shown.split("began")[1]
    assert "bad" in table and "good" in table and table.rstrip().endswith("the fault")


def test_command_that_does_not_exist_is_a_failed_part(ci, run):
    assert run(ci.Part("absent", ("/does/not/exist",)), shell(ci, "good", "true")) == {
        "absent": "failed",
        "good": "passed",
    }


def test_part_starts_after_the_parts_that_it_needs(ci, run, clone):
    after = shell(ci, "after", "test -e made", needs=("first",))
    assert run(after, shell(ci, "first", "sleep 0.1; touch made")) == {"first": "passed", "after": "passed"}


def test_two_parts_run_beside_each_other(ci, run, clone):
    os.mkfifo(clone / "one")
    os.mkfifo(clone / "other")
    here, there = "echo x >one; cat other", "cat one; echo x >other"
    assert set(run(shell(ci, "here", here), shell(ci, "there", there)).values()) == {"passed"}


def test_no_part_runs_beside_one_that_is_alone_nor_three_beside_each_other(ci, run, clone):
    (clone / "now").mkdir()
    count = "touch now/$0; sleep 0.02; ls now | wc -l >>$1; sleep 0.02; rm now/$0"
    parts = [
        ci.Part(f"{kind}{k}", ("sh", "-c", count, f"{kind}{k}", kind), alone=kind == "alone")
        for k in range(3)
        for kind in ("alone", "beside")
    ]
    assert set(run(*parts).values()) == {"passed"}
    assert (clone / "alone").read_text().split() == ["1"] * 3
    assert set((clone / "beside").read_text().split()) <= {"1", "2"}


def test_part_that_waits_runs_beside_two_others(ci, run, clone):
    for name in "abc":
        os.mkfifo(clone / name)
    waits = ci.Part("waits", ("sh", "-c", "echo x >a; echo x >b; cat c"), waits=True)
    assert set(run(shell(ci, "a", "cat a"), shell(ci, "b", "cat b; echo x >c"), waits).values()) == {"passed"}


def test_part_that_may_start_does_not_wait_for_those_before_it(ci, run, clone):
    waits = shell(ci, "waits", "test -e made", needs=("first",))
    parts = [
        shell(ci, "first", "until test -e late; do sleep 0.01; done; touch made"),
        waits,
        shell(ci, "last", "touch late"),
    ]
    assert set(run(*parts).values()) == {"passed"}


CHANGES = {
    "a file that it sees": lambda clone: (clone / "docs/page.md").write_text("other"),
    "a mode": lambda clone: (clone / "docs/page.md").chmod(0o755),
    "a new file": lambda clone: (clone / "docs/new.md").write_text(""),
    "a file that is gone": lambda clone: (clone / "docs/page.md").unlink(),
    "Makefile": lambda clone: (clone / "Makefile").write_text("other"),
    "an included makefile": lambda clone: (clone / "native.mk").write_text("other"),
    ".ci/run": lambda clone: (clone / ".ci/run").write_text("other"),
    "constraints.txt": lambda clone: (clone / "constraints.txt").write_text("other"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_part_is_skipped_until_something_that_it_sees_changes(ci, run, clone, change):
    part = shell(ci, "docs", "true", sees=("docs",))
    assert run(part) == {"docs": "passed"}
    (clone / "src/code.py").write_text("other")
    assert run(part) == {"docs": "skipped"}
    change(clone)
    assert run(part) == {"docs": "passed"}


def test_part_runs_again_on_another_machine_with_another_command_and_when_all_are_asked_for(ci, run):
    part = shell(ci, "docs", "true", sees=("docs",))
    assert run(part) == {"docs": "passed"}
    assert run(part, on="another Python") == {"docs": "passed"}
    assert run(shell(ci, "docs", "true;", sees=("docs",))) == {"docs": "passed"}
    assert run(part, everything=True) == {"docs": "passed"}
    assert run(part) == {"docs": "skipped"}


def test_without_a_repository_no_part_is_skipped(ci, run, clone, monkeypatch):
    (clone / ".git").rename(clone / "git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(clone.parent))
    part = shell(ci, "docs", "true", sees=("docs",))
    assert run(part) == run(part) == {"docs": "passed"}


def test_part_that_failed_is_not_skipped(ci, run):
    part = shell(ci, "docs", "false", sees=("docs",))
    assert run(part) == run(part) == {"docs": "failed"}


def test_part_that_does_not_say_what_it_sees_is_never_skipped(ci, run):
    part = shell(ci, "tests", "true")
    assert run(part) == run(part) == {"tests": "passed"}


def test_part_beside_which_files_changed_runs_again(ci, run, clone):
    part = shell(ci, "docs", "echo other >docs/page.md", sees=("docs",))
    assert run(part) == {"docs": "passed"}
    (clone / "docs/page.md").write_text("docs/page.md")  # as it was before the part ran, which read what came then
    assert run(part) == {"docs": "passed"}


@pytest.fixture
def landings(ci, clone):
    """`landings()` are the lines of the clone, as values."""
    file = clone / ci.LANDINGS
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_whole_run_that_passes_appends_a_line_with_its_commit_and_seconds(ci, run, clone, landings):
    burn = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"
    seconds = json.dumps({"quick": {"a.py": [2, 1.26], "b.py": [1, 0.1]}})
    tests = f"mkdir -p build/ci; echo '{seconds}' >{ci.MODULES}"
    run(shell(ci, "burns", burn, sees=("docs",)), shell(ci, "tests", tests), whole=True)
    (line,) = landings()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    assert line["commit"] == head and set(line["parts"]) == {"burns", "tests"}
    assert line["parts"]["burns"]["cpu"] > 0 and line["parts"]["burns"]["took"] > 0
    assert line["modules"] == {"quick": {"(others)": [1, 0.1], "a.py": [2, 1.3]}}


def test_run_that_fails_or_has_a_part_only_or_changed_files_appends_no_line(ci, run, clone, landings):
    run(shell(ci, "bad", "false"), whole=True)
    run(shell(ci, "good", "true"))
    run(shell(ci, "changes", "echo other >docs/page.md"), whole=True)
    run(shell(ci, "good", "true"), whole=True)
    assert not landings()
    commit(clone)
    run(shell(ci, "good", "true"), whole=True)
    run(shell(ci, "good", "true"), whole=True)  # the file of lines does not count as changed
    assert len(landings()) == 2


def test_clean_clone_skips_what_a_line_says_that_it_passed(ci, run, clone, tmp_path):
    part = shell(ci, "docs", "true", sees=("docs", "packaging"))
    assert run(part, whole=True) == {"docs": "passed"}
    (tmp_path / "kept" / "passed.jsonl").unlink()
    assert run(part) == {"docs": "skipped"}  # though the part sees the folder of the lines
    (clone / "docs/page.md").write_text("other")
    assert run(part) == {"docs": "passed"}


def test_every_path_that_a_part_sees_is_in_the_repository(ci):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("this is no clone")
    for path in {*ci.EVERY, *(path for part in ci.PARTS for path in part.sees)}:
        assert subprocess.run(["git", "ls-files", "--", path], cwd=ROOT, capture_output=True).stdout, path


def test_clusters_see_every_page_that_runs_on_one(ci):
    (sees,) = (part.sees for part in ci.PARTS if part.name == "test-ray")
    assert set(pages(with_peers=False, on_cluster=True)) <= set(sees)


def test_model_sees_every_native_file_that_it_includes(ci):
    (sees,) = (part.sees for part in ci.PARTS if part.name == "model")
    listed = subprocess.run(["git", "ls-files", "--", *sees], cwd=ROOT, capture_output=True, text=True).stdout
    if not listed:
        pytest.skip("this is no clone")
    files = [ROOT / path for path in listed.split() if path.endswith("pp")]
    names = [(file.parent, name) for file in files for name in re.findall(r'#include "(.+?)"', file.read_text())]
    included = {os.path.relpath(folder / name, ROOT) for folder, name in names}
    assert included and included <= set(listed.split()), included


def test_each_part_comes_after_all_that_it_needs(ci):
    before = set()
    for part in ci.PARTS:
        assert before.issuperset(part.needs), part.name
        before.add(part.name)


def test_parts_can_be_chosen_and_bring_those_that_they_need(ci):
    assert [part.name for part in ci.chosen(ci.PARTS, ["instructions"])] == ["environment", "tools", "instructions"]
    with pytest.raises(SystemExit, match=r"no part is called doc;.* docs"):
        ci.chosen(ci.PARTS, ["doc"])


def test_part_of_releases_runs_when_it_or_everything_is_asked_for(ci):
    parts = [shell(ci, "docs", "true"), ci.Part("long", ("true",), of_releases=True)]
    assert [part.name for part in ci.chosen(parts, [])] == ["docs"]
    assert [part.name for part in ci.chosen(parts, ["long"])] == ["long"]
    assert [part.name for part in ci.chosen(parts, [], everything=True)] == ["docs", "long"]


def test_tests_with_limits_of_time_on_both_cores_are_alone(ci):
    assert {part.name for part in ci.PARTS if part.alone} == {"tests", "theirs"}


def test_process_that_a_part_left_behind_is_ended(ci, run, clone):
    assert run(shell(ci, "leaves", "sleep 1000 >/dev/null 2>&1 & echo $! >left")) == {"leaves": "passed"}
    assert is_gone(int((clone / "left").read_text()))


@pytest.mark.parametrize(("command", "code"), [("true", 0), ("false", 1)])
def test_status_of_the_program_is_1_where_a_part_failed(ci, clone, monkeypatch, command, code):
    monkeypatch.setattr(ci, "ROOT", clone)
    monkeypatch.setenv("ENGRAM_ENVIRONMENTS", str(clone / "build" / "kept"))
    monkeypatch.setattr(sys, "argv", ["ci"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            ci.main([shell(ci, "only", command)], lambda: "")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_terminated_run_ends_all_parts_starts_no_other_and_fails(clone, number):
    driver = f"""
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT / "packaging")!r})
import ci
ci.ROOT = Path({str(clone)!r})
sleeps = "trap 'touch told.$0; exit' TERM; sleep 1000 & echo $! >$0.new; mv $0.new $0; wait"
parts = [ci.Part(name, ("sh", "-c", sleeps, name)) for name in "ab"]
ci.main([*parts, ci.Part("c", ("touch", "c"))], lambda: "")
"""
    environ = {**os.environ, "ENGRAM_ENVIRONMENTS": str(clone / "build" / "kept")}
    program = subprocess.Popen([sys.executable, "-c", driver], env=environ, stdout=subprocess.PIPE, text=True)
    assert comes(lambda: (clone / "a").exists() and (clone / "b").exists())
    program.send_signal(number)
    shown, _ = program.communicate()
    assert program.returncode not in (0, None) and "not run" in shown
    assert (clone / "told.a").exists() and (clone / "told.b").exists()
    assert all(is_gone(int((clone / name).read_text())) for name in "ab")
    assert not (clone / "c").exists()
