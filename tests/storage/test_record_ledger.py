"""The ledger of a site whose runs protect records: each is charged with the noise of its own size, and composed."""

from pathlib import Path

import pytest

from fedrp.algorithms.resolve import resolved
from fedrp.errors import DataError, PrivacyError
from fedrp.privacy.events import Adjacency, Adversary, Composed, GaussianRelease, Release, SampledRecords
from fedrp.privacy.records import event_of, event_record
from fedrp.privacy.total import total
from fedrp.records.steps import LocalSteps
from fedrp.storage.budget import budgets
from fedrp.storage.ledger import Caps, begin, read_ledger
from fedrp.storage.site import SiteFolder, Terms
from helpers import tiny_config

RECORDS, DELTA = 50, 1e-5
SERVER = Adversary.SERVER


def terms(records: int = RECORDS, **changes: object) -> Terms:
    given = {"dp_unit": "record", "dp_epsilon": 2.0, "batch_size": 10, "rounds": 2} | changes
    return Terms.of(resolved(tiny_config("fedrp-subspace", **given), 83), 1, "default", records)


def ask(state: Path, number: int, caps: Caps, asked: Terms) -> None:
    begin(SiteFolder(state, number.to_bytes(16, "big")), 0, asked, caps)


def test_a_site_is_charged_for_its_own_size(tmp_path: Path) -> None:
    caps = Caps()
    ask(tmp_path, 1, caps, terms())
    found = {r.adversary: r for r in read_ledger(tmp_path).entries[0].releases}
    steps = LocalSteps(RECORDS, 10, 1, 2)
    assert found[SERVER].event == steps.event(steps.noise_for(2.0, DELTA))
    assert found[SERVER].adjacency is Adjacency.RECORD_ADD_REMOVE
    assert set(found) == {adversary for adversary in Adversary if adversary.real}


def test_runs_for_records_compose_and_are_capped(tmp_path: Path) -> None:
    caps = Caps(total_epsilon=3.2)
    ask(tmp_path, 1, caps, terms())
    ask(tmp_path, 2, caps, terms())
    (budget,) = budgets(tmp_path)
    totals = {item.adversary: item for item in budget.totals}
    steps = LocalSteps(RECORDS, 10, 1, 4)  # two runs of two rounds are one of four
    assert totals[SERVER].epsilon == pytest.approx(
        steps.epsilon(LocalSteps(RECORDS, 10, 1, 2).noise_for(2.0, DELTA), DELTA)
    )
    assert 2.0 < (totals[SERVER].epsilon or 0) < 3.2
    assert totals[SERVER].adjacency is Adjacency.RECORD_ADD_REMOVE
    with pytest.raises(PrivacyError, match=r"total_epsilon=3\.2 .* 2\.\d+ spent, this run would add"):
        ask(tmp_path, 3, caps, terms(dp_epsilon=3.0))


def test_the_number_of_records_stays_the_same_to_the_end_of_a_run(tmp_path: Path) -> None:
    ask(tmp_path, 1, Caps(), terms())
    ask(tmp_path, 1, Caps(), terms())
    with pytest.raises(DataError, match="began with 50 records here, now there are 49"):
        ask(tmp_path, 1, Caps(), terms(49))


def test_a_run_for_clients_counts_for_records_with_half_its_noise() -> None:
    one = Release(SERVER, Adjacency.RECORD_ADD_REMOVE, LocalSteps(RECORDS, 10, 1, 2).event(2.0))
    other = Release(SERVER, Adjacency.CLIENT_ZEROED, Composed(GaussianRelease(6.0), 3))
    both = total([[one], [other]], SERVER, DELTA)
    assert both.adjacency is Adjacency.RECORD_ADD_REMOVE
    halved = Release(SERVER, Adjacency.RECORD_ADD_REMOVE, Composed(GaussianRelease(3.0), 3))
    assert both.epsilon == total([[one], [halved]], SERVER, DELTA).epsilon
    assert (both.epsilon or 0) > (total([[one]], SERVER, DELTA).epsilon or 0)


def test_a_run_that_protects_both_has_a_total_for_each() -> None:
    record = Release(SERVER, Adjacency.RECORD_ADD_REMOVE, LocalSteps(RECORDS, 10, 1, 2).event(2.0))
    client = Release(SERVER, Adjacency.CLIENT_ZEROED, Composed(GaussianRelease(1.0), 3))
    units = {unit: total([[record, client]], SERVER, DELTA, unit) for unit in ("record", "client")}
    assert units["client"].epsilon == total([[client]], SERVER, DELTA).epsilon
    assert units["record"].epsilon == total([[record]], SERVER, DELTA).epsilon
    assert total([[record, client]], SERVER, DELTA) == units["client"]


def test_a_replaced_record_is_not_one_more_or_less() -> None:
    record = Release(SERVER, Adjacency.RECORD_ADD_REMOVE, LocalSteps(RECORDS, 10, 1, 2).event(2.0))
    replaced = Release(SERVER, Adjacency.RECORD_REPLACE, Composed(GaussianRelease(4.0), 1))
    assert total([[record], [replaced]], SERVER, DELTA).epsilon is None


def test_sampled_records_come_back_from_json() -> None:
    event = Composed(SampledRecords(GaussianRelease(1.5), 0.25), 7)
    assert event_of(event_record(event)) == event
