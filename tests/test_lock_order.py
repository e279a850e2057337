"""The page says in which order locks are taken, of all that there are; what takes them in another one is reported."""

import contextlib
import copy
import os
import re
import threading
from pathlib import Path

import pytest
import torch

from contracts.lock_order import PAGE, SOURCE, Order, Row, checking, locks_of, table
from engram.data import LazyTensorStorage, ReplayBuffer

LOCKS = PAGE.read_text().split("\n## Locks\n")[1].split("\n## ")[0]
NATIVE = Path(__file__).parents[1] / "src/native"  # SOURCE is where engram is installed


def test_the_page_has_all_locks_of_the_source_and_no_others() -> None:
    made = {(name, str(file.relative_to(SOURCE))) for file in SOURCE.rglob("*.py") for name in locks_of(file).values()}
    rows = table(PAGE.read_text())
    assert {name for name, _ in made} == {name for row in rows for name in row.names}
    assert all((row.names[0], row.file) in made for row in rows)


def test_all_locks_are_assigned_to_an_attribute_or_a_variable() -> None:
    for file in SOURCE.rglob("*.py"):
        calls = re.findall(r"(?:threading\.|\b)(?:Lock|RLock|Condition|Semaphore|BoundedSemaphore)\(", file.read_text())
        assert len(calls) == len(locks_of(file)), file


FILES = r"fcntl\.(?:flock|lockf)\(|fcntl\.F_WRLCK"
MUTEXES = r"^ *(?:mutable )?std::mutex "


@pytest.mark.parametrize(("folder", "pattern"), [(SOURCE, FILES), (NATIVE, MUTEXES)])
def test_the_page_names_the_files_with_locks_between_processes_and_native_ones(folder: Path, pattern: str) -> None:
    sources = [file for kind in ("*.py", "*.hpp", "*.cpp") for file in folder.rglob(kind)]
    files = [file for file in sources if re.search(pattern, file.read_text(), re.MULTILINE)]
    missing = [str(file.relative_to(folder)) for file in files if f"`{file.relative_to(folder)}`" not in LOCKS]
    assert files and not missing


def test_a_lock_below_another_one_may_be_taken_under_it_where_the_row_says_so() -> None:
    order = Order(
        [Row(("a",), "", "`c`"), Row(("b", "twin"), "", "below"), Row(("c",), "", "nothing"), Row(("d",), "", "below")]
    )
    allowed = {(held, taken) for held in "abcd" for taken in "abcd" if order.allows(held, taken)}
    assert allowed == {("a", "c"), ("b", "c"), ("b", "d")}
    assert order.are_equal("b", "twin") and not order.are_equal("a", "b") and not order.are_equal("x", "y")


def take_the_sampler_first(rb: ReplayBuffer) -> None:
    with rb.sampler.lock, rb.storage.mutex:
        pass


def take_the_storage_first(rb: ReplayBuffer) -> None:
    with rb.storage.mutex:
        take_the_sampler(rb)


def take_the_sampler(rb: ReplayBuffer) -> None:
    with rb.sampler.lock:
        pass


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)


def test_a_lock_taken_out_of_order_is_reported_with_where_both_were_taken() -> None:
    with pytest.raises(AssertionError) as raised, checking():
        rb = buffer()
        take_the_sampler_first(rb)
        thread = threading.Thread(target=take_the_storage_first, args=(rb,))
        thread.start()
        thread.join()
    report = str(raised.value)
    assert "Sampler.lock is taken while Storage.mutex is held" in report
    held, taken = report.split("is taken here")
    assert re.search(r"test_lock_order\.py:\d+ take_the_storage_first", held)
    assert re.search(r"test_lock_order\.py:\d+ take_the_sampler\n", taken)
    assert "take_the_sampler_first" not in report


def test_locks_of_one_row_that_are_taken_in_both_orders_are_reported() -> None:
    with pytest.raises(AssertionError, match=r"(?s)both orders.*before:.*test_lock_order"), checking():
        first, second, third = (buffer().storage for _ in range(3))
        for outer, inner in ((first, second), (second, third), (third, first)):
            with outer.mutex, inner.mutex:
                pass


def test_a_lock_of_a_module_is_watched() -> None:
    from engram import _system

    drawing = _system.drawing
    with pytest.raises(AssertionError, match=r"Sampler\.lock is taken while drawing is held"), checking():
        rb = buffer()
        with _system.drawing:
            take_the_sampler(rb)
    assert _system.drawing is drawing


def test_what_a_forked_child_does_is_reported() -> None:
    with pytest.raises(AssertionError, match="take_the_storage_first"), checking():
        rb = buffer()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                take_the_storage_first(rb)
            os._exit(0)
        os.waitpid(child, 0)


def test_what_cannot_deadlock_is_not_reported() -> None:
    with checking():
        rb = buffer()
        rb.extend(torch.arange(4.0))
        with rb.sampler.lock, rb.storage.mutex, rb.sampler.lock, rb.storage.mutex:  # again by the same thread
            pass
        with rb.storage.mutex:
            assert rb.sampler.lock.acquire(blocking=False)
        rb.sampler.lock.release()
        take_the_sampler_first(rb)  # the storage's is not held any more
        copy.deepcopy(rb)


def test_locks_are_plain_before_and_after() -> None:
    factories = threading.Lock, threading.RLock, threading.Condition
    with checking():
        assert type(buffer().storage.mutex) is not type(threading.RLock())
    assert (threading.Lock, threading.RLock, threading.Condition) == factories
    assert type(buffer().storage.mutex) is type(threading.RLock())
