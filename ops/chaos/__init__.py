"""Killing a running stack on purpose and checking what it promised."""
