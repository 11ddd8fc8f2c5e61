"""The fuzzer's corpus, run once more: `make fuzz` looks for inputs that are not in it yet."""

import dataclasses
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fuzz_targets
from fedrp.errors import FedRPError
from fedrp.protocol import client
from fedrp.protocol import server as server_side
from fuzz_targets import TARGETS, BrokenRuleError, checked
from helpers import ROOT


def corpus(target: str) -> list[bytes]:
    lines = (ROOT / "tests" / "protocol" / "corpus" / f"{target}.txt").read_text().splitlines()
    return [bytes.fromhex(line) for line in lines]


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    tracemalloc.start()
    fuzz_targets.ready()
    yield
    tracemalloc.stop()


def replay(target: str, inputs: int | None = None) -> None:
    for data in corpus(target)[:inputs]:
        checked(TARGETS[target], data)


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_of_the_corpus_breaks_a_rule(target: str) -> None:
    replay(target)


def counted(patch: pytest.MonkeyPatch, module: Any, name: str, counts: Counter[str]) -> None:
    """Count what a function gives and how it refuses."""
    real = getattr(module, name)

    def watched(*arguments: Any) -> Any:
        try:
            found = real(*arguments)
        except FedRPError as error:
            counts[f"{name}: {str(error)[:20]}"] += 1
            raise
        counts[name] += 1
        return found

    patch.setattr(module, name, watched)


def test_the_corpus_reaches_both_state_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus that is refused at the door would say nothing about what comes behind it."""
    counts: Counter[str] = Counter()
    counted(monkeypatch, fuzz_targets, "respond", counts)
    counted(monkeypatch, fuzz_targets, "finished", counts)
    for name in ("welcome", "take_keys", "recover", "close_round"):
        counted(monkeypatch, server_side, name, counts)
    replay("client")
    replay("server")
    for name in ("respond", "finished", "welcome", "take_keys", "recover", "close_round"):
        assert counts[name] >= 5, f"{name}: {counts[name]}"
    reasons = [reason for reason in counts if reason.startswith("respond: ")]
    assert len(reasons) >= 20, reasons


# --- broken code is found --------------------------------------------------------------------------------------------


def crashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(client, "past_rounds", lambda *_arguments: {}["missing"])


def takes_memory(patch: pytest.MonkeyPatch) -> None:
    real = client.past_rounds
    patch.setattr(client, "past_rounds", lambda *arguments: (np.zeros(2**22, np.uint8), real(*arguments))[1])


def works_twice(patch: pytest.MonkeyPatch) -> None:
    real = client._work
    patch.setattr(client, "_work", lambda *client: real(*client)._replace(answered=False))


def notes_in_place(patch: pytest.MonkeyPatch) -> None:
    real = client.noted

    def noted(bench: Any, client: Any, site: Any, inbox: Any) -> Any:
        found, complaint = real(bench, client, site, inbox)
        client.envelopes.update(found.envelopes)
        return found, complaint

    patch.setattr(client, "noted", noted)


def closes_in_place(patch: pytest.MonkeyPatch) -> None:
    real = server_side.close_round

    def closed(server: Any, *arguments: Any) -> Any:
        after, report = real(server, *arguments)
        server.aggregates.update(after.aggregates)
        return after, report

    patch.setattr(server_side, "close_round", closed)


def believes_all_aggregates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server_side, "require_reachable", lambda *_arguments: None)


@pytest.mark.parametrize(
    ("target", "broken", "told"),
    [
        ("client", crashes, "missing"),
        ("client", takes_memory, "bytes of memory for an input of"),
        ("client", works_twice, "two uploads for one round"),
        ("client", notes_in_place, "changed a client in place"),
        ("server", closes_in_place, "changed the server in place"),
        ("server", believes_all_aggregates, "refuses what comes after a round with bad replies"),
    ],
)
def test_code_that_breaks_a_rule_is_found_by_the_corpus(
    target: str, broken: Callable[[pytest.MonkeyPatch], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stages are shared by all tests: what is broken must not change those of others.
    fresh = tuple(
        stage._replace(
            clients={c: dataclasses.replace(s, envelopes=dict(s.envelopes)) for c, s in stage.clients.items()},
            server=dataclasses.replace(stage.server, aggregates=dict(stage.server.aggregates)),
        )
        for stage in fuzz_targets.stages()
    )
    monkeypatch.setattr(fuzz_targets, "stages", lambda: fresh)
    broken(monkeypatch)
    with pytest.raises((BrokenRuleError, KeyError), match=told):
        replay(target)
