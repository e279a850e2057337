"""The code of the pages about clusters runs, on one."""

from __future__ import annotations

import pytest

from cluster.conftest import Nodes
from docs.pages import pages, run_page


@pytest.mark.parametrize("page", pages(with_peers=False, on_cluster=True))
def test_the_code_of_a_page_runs(page: str, tmp_path, cluster: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.cluster.address)
    run_page(page, tmp_path)
