"""Measurements: every figure is a ratio against a named alternative, taken in one run on one machine."""
