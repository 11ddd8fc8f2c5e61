"""Modules as one flat vector, and the values they begin with."""

from collections.abc import Callable
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError
from fedrp.learning.initial import public_initial, secret_initial
from fedrp.learning.layout import Layout, layout_of, load_vector, replace_batchnorm
from fedrp.learning.zoo import MODELS
from fedrp.rng import RunSeed
from helpers import TinyNet

KEY, OTHER_KEY = SecretKey(b"k" * 32), SecretKey(b"o" * 32)


def cnn() -> nn.Module:
    return MODELS["cnn"].build((1, 8, 8), 10)


def with_batchnorm() -> nn.Module:
    inner = nn.Sequential(nn.Conv2d(6, 12, 1), nn.BatchNorm2d(12))
    return nn.Sequential(nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6, eps=0.1), inner, nn.Flatten(), nn.LazyLinear(2))


# --- a module and its vector ---------------------------------------------------------------------------------------


def test_flatten_and_bind_are_inverse() -> None:
    module = TinyNet()
    layout = layout_of(module)
    vector = np.random.default_rng(0).normal(size=layout.size).astype(np.float32)
    layout.bind(module, torch.from_numpy(vector))
    assert np.array_equal(layout.flatten(module), vector)
    before = layout.flatten(TinyNet())
    layout.bind(module, torch.from_numpy(before))
    assert np.array_equal(layout.flatten(module), before)


def test_a_bound_module_lives_in_its_row_without_a_copy() -> None:
    module = TinyNet()
    layout = layout_of(module)
    rows = torch.zeros(3, layout.size)
    layout.bind(module, rows[1])
    assert {p.untyped_storage().data_ptr() for p in module.parameters()} == {rows.untyped_storage().data_ptr()}
    rows[1] += 2
    assert all((parameter == 2).all() for parameter in module.parameters())
    with torch.no_grad():
        module.output.bias.fill_(5)
    assert (rows[1, -3:] == 5).all()
    assert not rows[0].any()
    assert not rows[2].any()


def test_flatten_gives_a_copy() -> None:
    module = TinyNet()
    vector = layout_of(module).flatten(module)
    vector[:] = 0
    assert all(parameter.any() for parameter in module.parameters())


def test_frozen_parameters_stay_out_of_the_vector() -> None:
    module = TinyNet()
    module.hidden.requires_grad_(False)
    layout = layout_of(module)
    kept = module.hidden.weight.clone()
    assert layout.size == 27
    layout.bind(module, torch.zeros(27))
    assert torch.equal(module.hidden.weight, kept)
    assert not module.output.weight.any()


def test_load_vector() -> None:
    vector = np.arange(83, dtype=np.float32)
    module = load_vector(TinyNet(), vector)
    vector[:] = 0  # what was loaded must not change with it
    assert np.array_equal(layout_of(module).flatten(module), np.arange(83))


@pytest.mark.parametrize("kind", [torch.from_numpy, np.ndarray.tolist, np.float64])
def test_load_vector_takes_what_is_as_good_as_an_array(kind: Callable[[np.ndarray], object]) -> None:
    vector = public_initial(TinyNet, RunSeed(1))
    module = load_vector(TinyNet(), kind(vector))
    assert np.array_equal(layout_of(module).flatten(module), vector)


@pytest.mark.parametrize("vector", [[1.0, 2.0], np.zeros((83, 1)), "model.safetensors", None, [[1.0], [2.0, 3.0]]])
def test_load_vector_refuses_what_is_no_vector_of_this_model(vector: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^the vector (has shape \(.*\), but the model has 83 |is a \w+, not numbers)"
    ):
        load_vector(TinyNet(), vector)


def test_models_that_cannot_be_flattened_are_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameters"):
        layout_of(nn.ReLU())
    with pytest.raises(ConfigError, match=r"float64.*model.float\(\)"):
        layout_of(TinyNet().double())


# --- BatchNorm -----------------------------------------------------------------------------------------------------


def test_batchnorm_is_refused_by_name_and_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"layer '1' \(BatchNorm2d\).*fedrp\.replace_batchnorm"):
        layout_of(with_batchnorm())


def test_statistics_of_other_layers_have_another_fix() -> None:
    kept = nn.Sequential(nn.Conv2d(1, 6, 1), nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
    with pytest.raises(ConfigError, match=r"layer '1' \(InstanceNorm2d\).*: build it with track_running_stats=False$"):
        layout_of(replace_batchnorm(kept))
    assert layout_of(nn.InstanceNorm2d(6, affine=True)).size == 12


def test_replaced_batchnorm_trains_and_keeps_the_rest() -> None:
    module = with_batchnorm()
    convolution = module[0]
    module = replace_batchnorm(module)
    assert module[0] is convolution
    assert [(m.num_groups, m.num_channels, m.eps) for m in module.modules() if isinstance(m, nn.GroupNorm)] == [
        (6, 6, 0.1),
        (6, 12, 1e-5),
    ]
    module(torch.randn(3, 1, 4, 4)).sum().backward()
    assert layout_of(module).size == sum(prod(p.shape) for p in module.parameters())


@pytest.mark.parametrize("channels", [1, 7, 8, 12, 64])
def test_replaced_batchnorm_groups_divide_the_channels(channels: int) -> None:
    norm = replace_batchnorm(nn.BatchNorm1d(channels, affine=False), groups=8)
    assert isinstance(norm, nn.GroupNorm)
    assert channels % norm.num_groups == 0
    assert norm.num_groups <= 8
    assert norm.weight is None


# --- initial values ------------------------------------------------------------------------------------------------


def test_public_initial_repeats_and_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (public_initial(TinyNet, RunSeed(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_secret_initial_is_a_function_of_the_key_alone() -> None:
    first = secret_initial(cnn, KEY)
    torch.rand(3)  # the global generator must not matter
    assert np.array_equal(first, secret_initial(cnn, SecretKey(KEY.reveal())))
    other = secret_initial(cnn, OTHER_KEY)
    random = first != public_initial(cnn, RunSeed(0))
    assert (first[random] != other[random]).mean() > 0.999


def test_secret_initial_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    secret_initial(TinyNet, KEY)
    assert torch.equal(torch.get_rng_state(), state)


def test_secret_initial_keeps_constants_and_scales_and_shares_nothing_else_with_the_public_one() -> None:
    layout = layout_of(cnn())
    names = [name for name, _ in cnn().named_parameters()]
    public, secret = public_initial(cnn, RunSeed(0)), secret_initial(cnn, KEY)
    constants = 0
    for name, size, drawn, template in zip(names, *parts(layout, secret, public), strict=True):
        if template.std() == 0:
            constants += 1
            assert np.array_equal(drawn, template), name
        else:
            assert (drawn == template).mean() < 0.01, name
            assert abs(np.corrcoef(drawn, template)[0, 1]) < 5 / size**0.5, name
            # the standard deviation of `size` normals has a relative standard error of 1/sqrt(2 size)
            assert abs(drawn.std() / template.std() - 1) < 5 / (2 * size) ** 0.5, name
    assert constants == 12  # gain and shift of six GroupNorms


class Finetuned(nn.Module):
    """A pretrained layer, a table that is the same in every build, and a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 20)
        self.table = nn.Parameter(torch.randn(4, 20, generator=torch.Generator().manual_seed(1)))
        self.head = nn.Linear(20, 3)
        self.body.load_state_dict(PRETRAINED)


PRETRAINED = {"weight": torch.linspace(-1, 1, 120).reshape(20, 6), "bias": torch.linspace(0, 1, 20)}


def test_secret_initial_keeps_what_is_given_and_draws_the_rest() -> None:
    state = torch.get_rng_state()
    first, other = (load_vector(Finetuned(), secret_initial(Finetuned, key)) for key in (KEY, OTHER_KEY))
    torch.set_rng_state(state)
    for model in (first, other):
        assert torch.equal(model.body.weight, PRETRAINED["weight"])
        assert torch.equal(model.body.bias, PRETRAINED["bias"])
        assert torch.equal(model.table, Finetuned().table)
    assert (first.head.weight != other.head.weight).all()
    assert (first.head.bias != other.head.bias).all()


def test_secret_initial_of_random_tensors_is_the_formula_of_the_docs() -> None:
    """Published runs rest on these bits: telling given from drawn tensors must not change them."""
    public, normals = public_initial(cnn, RunSeed(0)), KEY.derive("initial-model").normals(layout_of(cnn()).size)
    expected = []
    for size, template, noise in zip(*parts(layout_of(cnn()), public, normals), strict=True):
        mean, spread = np.float32(template.mean(dtype=np.float64)), np.float32(template.astype(np.float64).std())
        assert len(template) == size
        expected.append(mean + spread * noise if spread > 0 else template)
    assert secret_initial(cnn, KEY).tobytes() == np.concatenate(expected).tobytes()


def test_a_single_number_is_drawn_from_the_secret_too() -> None:
    public = public_initial(lambda: nn.Linear(5, 1), RunSeed(0))[-1]
    drawn = np.array([secret_initial(lambda: nn.Linear(5, 1), SecretKey(bytes([n]) * 32))[-1] for n in range(200)])
    assert len(set(drawn.tolist())) == 200
    assert public not in drawn
    again = public_initial(lambda: nn.Linear(5, 1), RunSeed(1))[-1]
    spread = abs(public - again) / 2
    assert abs(np.mean(drawn) - (public + again) / 2) < 4 * spread / np.sqrt(200)
    assert np.std(drawn) == pytest.approx(spread, rel=4 / np.sqrt(400))


def test_a_single_gain_near_one_stays_near_one() -> None:
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(1 + 0.01 * torch.randn(1))

    drawn = [secret_initial(Gain, SecretKey(bytes([n]) * 32))[0] for n in range(50)]
    assert len(set(drawn)) == 50
    assert 0.9 < min(drawn) < max(drawn) < 1.1


def test_a_single_number_that_is_given_stays() -> None:
    def given() -> nn.Module:
        module = nn.Linear(5, 1)
        nn.init.constant_(module.bias, 0.25)
        return module

    assert secret_initial(given, KEY)[-1] == secret_initial(given, OTHER_KEY)[-1] == np.float32(0.25)


def test_secret_initial_builds_twice_and_leaves_the_global_generator_alone() -> None:
    calls = []

    def counted() -> nn.Module:
        calls.append(torch.random.initial_seed())
        return Finetuned()

    state = torch.get_rng_state()
    secret_initial(counted, KEY)
    assert len(set(calls)) == len(calls) == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_a_factory_that_hands_out_the_same_parameters_is_refused() -> None:
    module = TinyNet()
    with pytest.raises(ConfigError, match=r"same parameter 'hidden\.weight' at every call.*copy\.deepcopy"):
        secret_initial(lambda: module, KEY)
    with pytest.raises(ConfigError, match=r"same parameter '0\.weight' at every call"):
        secret_initial(lambda: nn.Sequential(module.hidden, nn.Linear(8, 2)), KEY)
    frozen = TinyNet().requires_grad_(False)  # never changes, so it may be shared
    assert secret_initial(lambda: nn.Sequential(frozen, nn.Linear(3, 2)), KEY).size == 8


def test_a_factory_that_builds_different_models_is_refused() -> None:
    widths = iter((5, 7))
    with pytest.raises(ConfigError, match=r"other layers at each call \(12 parameters, then 16\)"):
        secret_initial(lambda: nn.Linear(next(widths), 2), KEY)


def parts(layout: Layout, *vectors: np.ndarray) -> list[list[object]]:
    sizes = [prod(shape) for shape in layout.shapes]
    return [sizes, *(np.split(vector, np.cumsum(sizes)[:-1]) for vector in vectors)]
