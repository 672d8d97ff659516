"""A run directory as one self-contained HTML page. Never imports torch or the trainer."""

from leanroll.report.page import write_report

__all__ = ["write_report"]
