"""Handwritten digits, learned together."""
