"""Programs that are forked from a template end as those do that Python starts."""

import signal
import subprocess
import sys

import pytest

from contracts.each import each
from contracts.programs import run_program

ENDS = {
    "it comes to its end": "print(sys.argv[1:], __name__, len(os.environ['HOME']) > 0)",
    "it has a status": "sys.exit(3)",
    "it says why": "sys.exit('because')",
    "it is killed": "print('so far', flush=True); os.kill(os.getpid(), 9)",
    "ctrl-c": "os.kill(os.getpid(), 2); time.sleep(10)",
    "exit handlers": "import atexit; atexit.register(print, 'handled')",
    "globals outlive the last line": """
class Noisy:
    def __del__(self): print('deleted')
noisy = Noisy()
import atexit; atexit.register(print, 'before')""",
}


@pytest.mark.deep
@each("end", ENDS)
def test_a_program_ends_as_one_that_python_starts(end, tmp_path):
    file = tmp_path / "program.py"
    file.write_text("import os, sys, time\n" + ENDS[end])
    one = subprocess.run([sys.executable, file, "a", "2"], capture_output=True, text=True)
    other = run_program(file.read_text(), "a", 2)
    assert (one.returncode, one.stdout) == (other.returncode, other.stdout)
    assert one.stderr.splitlines()[-1:] == other.stderr.splitlines()[-1:]


def test_an_uncaught_error_is_a_status_and_a_traceback():
    program = run_program("raise KeyError('this')")
    assert program.returncode == 1 and program.stderr.endswith("KeyError: 'this'\n")


def test_a_program_that_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        run_program("import time; time.sleep(100)", timeout=0.1)


def test_the_status_of_a_killed_program_is_the_signal():
    assert run_program("import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
