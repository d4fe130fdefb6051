"""The report of a run: its records as pictures and plain words in one HTML file that needs nothing else."""

from counterflow.report.render import write_report

__all__ = ["write_report"]
