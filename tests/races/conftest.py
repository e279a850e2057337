"""Threads that race take locks in the order of docs/architecture.md."""

import pytest

#: It puts another lock in the place of a sampler's, whose `id` then orders the members of an ensemble.
REPLACES_A_LOCK = "test_a_batch_that_was_drawn_before_a_load_is_drawn_anew_after_it"


@pytest.fixture(autouse=True)
def _in_order(request: pytest.FixtureRequest) -> None:
    if request.node.originalname != REPLACES_A_LOCK:
        request.getfixturevalue("lock_order")
