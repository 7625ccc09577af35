"""The report of one session: what it did, how fast, what slowed it down, and what could not be seen.

``build_report(store, …)`` asks the store and answers with a ``Report`` (plain data, ``model``); ``html.page`` draws it
as one self-contained page, ``cli/report.py`` as text and JSON.
"""

from gpuflight.events.report.build import build_report
from gpuflight.events.report.model import Report

__all__ = ["Report", "build_report"]
