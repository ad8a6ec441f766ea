"""The end of the report: what each step of each test has cost (``record_property``, ``tests.chaos.traffic.step``)."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    measured = [(report.nodeid, *each) for report in told for each in report.user_properties]
    if not measured:
        return
    terminalreporter.section("unavailability, step by step")
    width = max(len(name) for _, name, _ in measured)
    before = ""
    for nodeid, name, value in measured:
        if nodeid != before:
            terminalreporter.write_line(nodeid.rpartition("/")[2])
            before = nodeid
        terminalreporter.write_line(f"  {name:<{width}}  {value}")
