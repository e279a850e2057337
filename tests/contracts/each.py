"""Many values in one test, where a test of its own for each would cost more than what it looks at."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

LINES = 20


def each(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize`, but all cases are one test, whose error names every case that failed.

    For parameters that are files or plain values. Each case has a folder of its own in `tmp_path` and `ram_path`, and
    what it does with `monkeypatch` ends with it. Other fixtures are shared by the cases: a test that leaves something
    behind in one of them needs `parametrize`.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    all_cases = list(cases)
    assert all_cases, "a test without a case looks at nothing"

    def together(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        assert set(wanted) <= set(signature.parameters), f"{test.__name__} takes no {wanted}"

        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            wrong: list[tuple[int, Any, BaseException]] = []
            for number, case in enumerate(all_cases):
                values = case if len(wanted) > 1 else (case,)
                try:
                    with ExitStack() as stack:
                        own = {name: _own(name, fixture, number, stack) for name, fixture in given.items()}
                        test(*args, **own, **dict(zip(wanted, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    wrong.append((number, case, error))
            if wrong:
                told = [  # with their place in the list: some values, such as functions, have no name
                    f"case {number}: {', '.join(wanted)} = {case!r}: {type(error).__name__}: {error}"
                    for number, case, error in wrong[:LINES]
                ]
                more = [f"and {len(wrong) - LINES} more"] if len(wrong) > LINES else []
                count = f"{len(wrong)} of {len(all_cases)} cases failed"
                raise AssertionError("\n".join([count, *told, *more])) from wrong[0][2]

        left = [parameter for name, parameter in signature.parameters.items() if name not in wanted]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # what pytest asks for fixtures
        return run

    return together


def _own(name: str, fixture: Any, number: int, stack: ExitStack) -> Any:
    """What the case of this number has of a fixture."""
    if name in ("tmp_path", "ram_path"):
        folder = fixture / f"case-{number}"
        folder.mkdir()
        return folder
    return stack.enter_context(fixture.context()) if name == "monkeypatch" else fixture
