"""The commonest calls call no more Python functions than `contracts/call_trace.json` says."""

from __future__ import annotations

import json

import pytest

from contracts import call_trace
from engram.store.layout import has_exchange_api


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return call_trace.measure(tmp_path_factory.mktemp("trace"))


KEPT = json.loads(call_trace.KEPT.read_text())


@pytest.mark.skipif(not has_exchange_api(), reason="a torch without the DLPack exchange API calls more")
@pytest.mark.parametrize("name", KEPT)
def test_call_trace_is_not_longer_than_the_file(name, measured):
    calls = measured[name]
    assert 0 < sum(calls.values()) <= KEPT[name], (
        f"{name} calls {sum(calls.values())} functions, {KEPT[name]} before: {calls.most_common(30)}; "
        "if that must be, `make call-trace` writes the file anew"
    )


def test_file_names_every_measured_call(measured):
    assert list(measured) == list(KEPT)
