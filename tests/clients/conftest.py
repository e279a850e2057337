"""What code that was written for other libraries finds in engram: runs where they are installed (`make interop`)."""

import importlib.util

import pytest

TORCHRL = importlib.util.find_spec("torchrl") is not None
collect_ignore_glob = [] if TORCHRL else ["test_*.py"]
if TORCHRL:
    import clients.forked_workers  # noqa: F401
#: Rows of the tables that are printed at the end: the table's title, the row's name, the package, what came out.
RESULTS = pytest.StashKey[list[tuple[str, str, str, str]]]()


@pytest.fixture
def tell(record_property):
    """`tell(table, row, package, outcome)` adds a cell to a table that is printed at the end, from any test process."""
    return lambda table, row, package, outcome: record_property("cell", (table, row, package, outcome))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, cell in getattr(report, "user_properties", []) if getattr(report, "when", "") == "call" else []:
                if name == "cell":
                    table, row, package, outcome = cell
                    tables.setdefault(table, {}).setdefault(row, {})[package] = outcome
    for table, rows in tables.items():
        terminalreporter.section(table)
        for row, cells in sorted(rows.items()):
            terminalreporter.write_line(f"{row:<100.100} " + "  ".join(f"{p}: {o}" for p, o in sorted(cells.items())))
