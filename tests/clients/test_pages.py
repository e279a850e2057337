"""The code of the pages that use other libraries runs."""

import pytest

from docs.pages import pages, run_page


@pytest.mark.parametrize("page", pages(with_peers=True))
def test_the_code_of_a_page_runs(page, tmp_path):
    run_page(page, tmp_path)
