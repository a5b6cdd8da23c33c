"""Charts, tables and the capacity-planning report of simulated runs."""

from __future__ import annotations

from reports.html import write_report

__all__ = ["write_report"]
