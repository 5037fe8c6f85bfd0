"""Keeps one service alive: `python -m ops.supervise NAME`, one line of the Procfile each.

Owns the service's process and its incarnation counter; knows nothing of what the service does.
"""
