"""Engines of local training: clients one after the other, or several computed as one."""
