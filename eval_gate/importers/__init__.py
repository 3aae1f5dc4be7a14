"""Turns other tools' files into query files: one module a format, `convert` to run one. No grading here.

A converted file is written whole or not at all, and a record that has no counterpart is refused by file and line.
"""

from __future__ import annotations

from eval_gate.importers.conversion import FORMATS, Conversion, convert
from eval_gate.importers.records import Imported, ImportOptions

__all__ = ["FORMATS", "Conversion", "ImportOptions", "Imported", "convert"]
