"""Delivered models for other programs: files that need no fedrp, and predictions."""
