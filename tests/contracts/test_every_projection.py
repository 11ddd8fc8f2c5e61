"""What every entry of FAMILIES promises; and that each promise, once broken, is found."""

import pytest

from fedrp.crypto.secret import SecretKey
from fedrp.projection.families import FAMILIES, SignProjection
from fedrp.projection.tags import TAGS, Tag
from fedrp.testing.projection_contracts import PROJECTION_CONTRACTS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("contract", PROJECTION_CONTRACTS, ids=lambda contract: contract.__name__)
def test_every_family_keeps_the_contract(family, contract):
    contract(family)


class Wrong(SignProjection):
    """`sign`, with one promise broken."""

    def __init__(self, key, columns, rows, fault):
        super().__init__(SecretKey(bytes(32)) if fault == "key" else key, columns, rows)
        self.fault = fault

    def _forward(self, stack, out):
        super()._forward(stack, out)
        if self.fault == "scale":
            out *= 1.05
        if self.fault == "stack" and len(stack) > 1:
            out[1:] += 0.01

    def _adjoint(self, stack, out):
        super()._adjoint(stack, out)
        if self.fault == "scale":
            out *= 1.05

    def __repr__(self):
        return f"Wrong({self._signs})" if self.fault == "repr" else super().__repr__()


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("none", []),
        ("key", ["key_and_shape_decide_the_matrix", "one_bit_of_the_key_changes_everything"]),
        ("scale", ["the_norm_bound_holds", "lengths_are_kept_on_average"]),
        ("stack", ["stacks_and_layouts_are_irrelevant"]),
        ("repr", ["a_projection_does_not_leak"]),
        ("tag", ["its_tag_is_its_own"]),
    ],
)
def test_contracts_find_what_is_broken(fault, broken, monkeypatch):
    wrong = FAMILIES["sign"]._replace(make=lambda key, columns, rows, _: Wrong(key, columns, rows, fault))
    monkeypatch.setitem(FAMILIES, "wrong", wrong)
    monkeypatch.setitem(TAGS, "wrong", Tag(2 if fault == "tag" else 200, 1))
    found = []
    for contract in PROJECTION_CONTRACTS:
        try:
            contract("wrong")
        except AssertionError:
            found.append(contract.__name__)
    assert set(broken) <= set(found)
    assert bool(found) == (fault != "none")
