"""Readouts and transfer tasks: one command and one protocol each (the paper, section 4)."""
