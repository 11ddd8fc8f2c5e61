"""What every entry of FAMILIES promises; and that each promise, once broken, is found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrp.crypto.secret import SecretKey
from fedrp.projection.families import FAMILIES, SignProjection, make_projection
from fedrp.projection.tags import TAGS, Tag
from fedrp.testing.projection_contracts import KEY, PROJECTION_CONTRACTS, dense, require_linear


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("contract", PROJECTION_CONTRACTS, ids=lambda contract: contract.__name__)
def test_every_family_keeps_the_contract(family, contract):
    contract(family)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60)
@given(shape=st.tuples(st.integers(1, 400), st.integers(1, 400)), byte=st.integers(0, 255))
def test_every_family_is_linear_in_any_shape(family, shape, byte):
    key = SecretKey(bytes([byte]) * 32)
    require_linear(make_projection(family, key, columns=max(shape), rows=min(shape)), seed=byte)


@pytest.mark.parametrize("family", ["gaussian", "sign", "hadamard"])
@pytest.mark.parametrize("bit", [0, 77, 255])
def test_one_bit_of_the_key_changes_nearly_every_entry(family, bit):
    """As chance has it where entries have many values: of 2,000 columns of `sign`, one in ten keeps its row."""
    raw = bytearray(KEY.reveal())
    raw[bit // 8] ^= 1 << bit % 8
    a, b = (dense(make_projection(family, key, 2000, 10)) for key in (KEY, SecretKey(bytes(raw))))
    if family == "sign":
        assert abs(np.count_nonzero(a * b) - 200) < 5 * np.sqrt(200)
    else:
        assert (a != b).mean() > 0.95


class Wrong(SignProjection):
    """`sign`, with one promise broken."""

    def __init__(self, key, columns, rows, fault):
        super().__init__(SecretKey(bytes(32)) if fault == "key" else key, columns, rows)
        self.fault = fault

    def _forward(self, stack, out):
        super()._forward(stack, out)
        if self.fault == "scale":
            out *= 1.05
        if self.fault == "bend":
            out += 1e-3 * np.abs(out)
        if self.fault == "stack" and len(stack) > 1:
            out[1:] += 0.01

    def _adjoint(self, stack, out):
        super()._adjoint(stack, out)
        if self.fault == "scale":
            out *= 1.05

    def native(self, device):
        operator = super().native(device)
        return operator._replace(adjoint=lambda theta: -operator.adjoint(theta)) if self.fault == "device" else operator

    def __repr__(self):
        return f"Wrong({self._signs})" if self.fault == "repr" else super().__repr__()


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("none", []),
        ("key", ["key_and_shape_decide_the_matrix", "one_bit_of_the_key_changes_everything"]),
        ("scale", ["the_norm_bound_holds", "lengths_are_kept_on_average"]),
        ("bend", ["forward_and_adjoint_belong_together_and_are_linear"]),
        ("stack", ["stacks_and_layouts_are_irrelevant"]),
        ("device", ["tensors_of_a_device_are_projected_alike"]),
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
