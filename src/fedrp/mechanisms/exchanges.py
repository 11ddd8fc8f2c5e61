"""Exchanges of packets between a server and its clients: what they are for, and what came of them."""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from fedrp.errors import QuorumError

Take = Callable[[int, bytes], None]  # is called with each reply as it comes, and does not keep it


class Step(Enum):
    """What an exchange is for."""

    TRAIN = "train"
    RECOVER = "recover"
    DEAL = "deal"


class Exchange(NamedTuple):
    """Which exchange this is, for carriers that lose packets on purpose or do not wait for everyone."""

    step: Step
    round: int
    attempt: int  # from 1
    needed: int  # replies, without which the exchange is of no use


class Answers(NamedTuple):
    """What came back of an exchange, replies apart: those were handed over as they came."""

    refused: Mapping[int, str] = {}  # client -> code
    absent: frozenset[int] = frozenset()  # clients that were not reached in time


class Missed(NamedTuple):
    """An attempt at a round that had too few uploads."""

    round: int
    attempt: int
    asked: frozenset[int]
    answers: Answers
    error: QuorumError
