"""The end of the chaos tests' report: what each has measured (``record_property``)."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    measured = [(report.nodeid, name, value) for report in told for name, value in report.user_properties]
    if measured:
        terminalreporter.section("unavailability, step by step")
        for nodeid, name, value in measured:
            terminalreporter.write_line(f"{nodeid.rpartition('::')[2]}: {name}: {value}")
