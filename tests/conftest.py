"""The same examples in every run of the suite (`make test-search` looks for new ones), and scripts that end with it."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import settings

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

_DIES_WITH_ITS_PARENT = 1  # prctl's PR_SET_PDEATHSIG


@pytest.fixture
def script(tmp_path):
    """`script(text, **names)` starts Python on a text, and ends it with the test, or with the process of the tests."""
    started = []

    def start(text, **names):
        file = tmp_path / f"script_{len(started)}.py"
        file.write_text(textwrap.dedent(text).format(**names))
        prctl = ctypes.CDLL(None).prctl
        process = subprocess.Popen(
            [sys.executable, str(file)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            text=True,
            start_new_session=True,
            preexec_fn=lambda: (
                prctl(_DIES_WITH_ITS_PARENT, signal.SIGKILL),
                signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell that runs tests in the background ignores it
            ),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
