"""What is mutated, how mutants are known again, and how many native ones stand in one text."""

from __future__ import annotations

import ast
import textwrap

import pytest

from mutation.candidates import candidates, choose
from mutation.native import planted

PYTHON = '''
    """Docstring 1."""
    LIMIT = 8
    POLL_S = 0.5

    class Ring:
        def __repr__(self) -> str:
            return f"{self.n:3}"

        def put(self, row: "list[3]", n=1):
            if n < self.capacity:
                raise ValueError(f"{n} < 1")
            with self._lock, open(row) as file:
                self.copy(row, n)
            return row is None

        def stop(self, pid=0):
            if pid > 0:
                os.kill(pid, 9)
'''
NATIVE = """
    #include <mutex>
    template <int n = 3>
    uint64_t advance(uint64_t a, uint64_t b) {
      const std::lock_guard<std::mutex> guard(mutex_);
      if (a < b) throw Refused("1 < 2");
      notify(first(a, b), 7);
      return a == b;  // 5 < 6
    }
"""


@pytest.fixture
def sources(tmp_path):
    def make(python=PYTHON, native=NATIVE):
        for name, text in (("engram/ring.py", python), ("native/ring.hpp", native)):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path

    return make


def texts(found, package):
    return {(m.kind, m.before, m.after) for m in found if m.package == package}


def test_python_mutants_leave_out_texts_annotations_and_functions_that_send_signals(sources):
    assert texts(candidates(sources()), "engram") == {
        ("constant changed", "LIMIT = 8", "LIMIT = 9"),
        ("constant changed", 'def put(self, row: "list[3]", n=1):', 'def put(self, row: "list[3]", n=2):'),
        ("comparison swapped", "if n < self.capacity:", "if n >= self.capacity:"),
        ("boundary off by one", "if n < self.capacity:", "if n <= self.capacity:"),
        ("raise removed", 'raise ValueError(f"{n} < 1")', "pass"),
        ("lock dropped", "with self._lock, open(row) as file:", "with open(row) as file:"),
        ("call dropped", "self.copy(row, n)", "pass"),
        ("arguments swapped", "self.copy(row, n)", "self.copy(n, row)"),
        ("comparison swapped", "return row is None", "return row is not None"),
    }


def test_every_python_mutant_compiles_and_moves_no_line(sources):
    folder = sources()
    data = (folder / "engram/ring.py").read_bytes()
    for m in candidates(folder):
        if m.package == "engram":
            mutated = data[: m.start] + m.new.encode() + data[m.end :]
            ast.parse(mutated)
            assert mutated != data and mutated.count(b"\n") == data.count(b"\n")


def test_native_mutants_are_those_of_expressions(sources):
    line = "notify(first(a, b), 7);"
    assert texts(candidates(sources()), "native") == {
        ("lock dropped", "const std::lock_guard<std::mutex> guard(mutex_);", ""),
        ("comparison swapped", 'if (a < b) throw Refused("1 < 2");', 'if (a >= b) throw Refused("1 < 2");'),
        ("raise removed", 'if (a < b) throw Refused("1 < 2");', "if (a < b) ;"),
        ("constant changed", line, "notify(first(a, b), 8);"),
        ("arguments swapped", line, "notify(first(b, a), 7);"),
        ("call dropped", line, ";"),
        ("comparison swapped", "return a == b;", "return a != b;"),
    }  # fmt: skip


def test_native_mutants_have_the_name_of_their_function_and_its_class(sources):
    inside = "class Ring {\n  bool is_full(int n) {\n    return n == 8;\n  }\n};\n"
    outside = "bool Ring::is_full(int n) {\n  return n == 8;\n}\n"
    for text in (inside, outside):
        assert {m.function for m in candidates(sources(native=text)) if m.package == "native"} == {"ring: Ring.is_full"}


def test_native_mutants_stand_in_one_text_one_within_the_other(sources):
    folder = sources()
    data = (folder / "native/ring.hpp").read_bytes()
    native = [m for m in candidates(folder) if m.package == "native"]
    text = planted(data, list(enumerate(native))).decode()
    of = {m.kind: f"0x{m.number}u, {i}u" for i, m in enumerate(native)}
    swapped = f"(::mutants::planted<{of['arguments swapped']}>() ? first(b, a) : first(a, b))"
    call = f"notify({swapped}, ::mutants::constant<{of['constant changed']}>(7))"
    assert f"(::mutants::planted<{of['call dropped']}>() ? void() : void({call}));" in text
    assert f"return a == ::mutants::At<{of['comparison swapped']}, 'e', 'n'>{{}} == b;" in text
    assert text.count("\n") == data.decode().count("\n")


def test_mutants_keep_their_numbers_where_other_lines_change(sources):
    before = {m.number for m in candidates(sources())}
    moved = PYTHON.replace("LIMIT = 8", "LIMIT = 10\n    MORE = 11").replace("Ring:", "Ring:\n        size = n")
    after = {m.number for m in candidates(sources(moved, "\n// new\n" + textwrap.dedent(NATIVE)))}
    assert len(before - after) == 1 and len(after - before) == 2


def test_choice_has_what_is_wanted_of_each_file(sources):
    found = candidates(sources())
    file = found[0].file
    others = [m.number for m in found if m.file != file]
    chosen = choose(found, len(others) // 2 + 3, 3, others[: len(others) // 2], {file: 3})
    assert sum(m.file == file for m in chosen) == 3 and {m.number for m in chosen} >= {*others[: len(others) // 2]}


def test_choice_has_all_kinds_and_keeps_what_was_chosen_before(sources):
    found = candidates(sources())
    few, more = choose(found, 8, seed=3), choose(found, 12, seed=3)
    assert [m.number for m in more[:8]] == [m.number for m in few]
    assert {m.kind for m in more} == {m.kind for m in found}
    kept = [m.number for m in found[::2]]
    assert {m.number for m in choose(found, len(kept), 5, kept)} == set(kept)
    assert [m.number for m in choose(found, 8, seed=4)] != [m.number for m in few]
