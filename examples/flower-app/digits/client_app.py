"""Runs at every site."""

from digits.task import load
from fedrp.flower import client_app

app = client_app(load)
