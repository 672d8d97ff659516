"""A run, calibration or profile directory as one self-contained HTML page. Never imports torch or the trainer."""

from leanroll.report.calibration import is_calibration, write_calibration_report
from leanroll.report.page import write_report
from leanroll.report.profile import is_profile, write_profile_report

__all__ = ["is_calibration", "is_profile", "write_calibration_report", "write_profile_report", "write_report"]
