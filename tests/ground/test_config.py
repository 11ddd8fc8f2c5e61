"""Settings: what is valid, where they come from, and how mistakes are told."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrp.config import GROUPS, Resolved, RunConfig, Speed, from_settings, read_toml, require_choice, to_json
from fedrp.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(RunConfig)]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *[(name, (0, -1)) for name in ("clients", "rounds", "local_epochs", "batch_size", "dim")],
        *[(name, (0.0, -0.1, NAN, INF)) for name in ("lr", "rho", "clip", "dp_epsilon")],
        ("momentum", (-0.1, 1.0, NAN)),
        ("grad_clip", (-1.0, NAN, INF)),
        ("participation", (0.0, -0.5, 1.01, NAN)),
        ("dropout", (-0.1, 1.0, NAN)),
        ("quorum", (0.0, 1.5)),
        ("noise_multiplier", (-1.0, NAN, INF)),
        ("dp_delta", (0.0, 1.0, NAN)),
        ("seed", (-1, 2**63)),
        ("weighting", ("by-size",)),
        ("aggregation", ("mode", "trimmed:0.5", "trimmed:nan")),
    ],
)
def test_values_out_of_range_are_refused_by_name_and_value(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=name) as caught:
            RunConfig(**{name: value})
        assert str(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("workers", 0), ("threads", -1), ("projection_memory", -1)])
def test_speed_is_checked_too(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        Speed(**{name: value})


def test_noise_is_given_in_one_way_only() -> None:
    with pytest.raises(ConfigError, match="not both"):
        RunConfig(noise_multiplier=1.0, dp_epsilon=1.0)


def test_a_config_survives_json() -> None:
    config = RunConfig(algorithm="fedadmm", lr=0.1, rho=0.25, seed=7)
    assert RunConfig(**json.loads(to_json(config))) == config


# --- resolved settings -----------------------------------------------------------------------------------------------

NULLABLE = [field.name for field in dataclasses.fields(RunConfig) if field.default is None]


def test_resolved_settings_have_no_none() -> None:
    """Where there is none of something, 0 or the empty string says so; some have a default of their own."""
    config = Resolved.of(RunConfig(lr=0.1))
    assert [name for name in FIELDS if getattr(config, name) is None] == []
    assert {name: getattr(config, name) for name in NULLABLE if getattr(config, name)} == {
        "lr": 0.1,
        "batch_size": 64,
        "lr_schedule": "constant",
        "momentum": 0.9,
        "quorum": 0.5,
        "dp_noise": "shared",
        "bits": 32.0,
        "bits_down": 32.0,
    }
    assert not config.private
    assert not config.bounded


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"server_momentum": 0.0},
        {"quorum": 0.5},
        {"clip": 0.3, "noise_multiplier": 0.0, "quorum": 0.5, "dp_noise": "shared", "server_momentum": 0.0},
        {"clip": 0.3, "noise_multiplier": 1.1, "clip_quantile": 0.5, "quorum": 1.0},
        {"ball": 2.0, "norm_floor": 0.5, "rho": 0.1, "projection": "sign", "train_examples": 7},
        {"sensitivity": 0.1},
    ],
)
def test_what_is_stored_has_null_for_what_there_is_none_of(given: dict[str, object]) -> None:
    """As run folders and site folders of earlier versions have it: the way there and back changes nothing."""
    config = RunConfig(**{"lr": 0.1, **given})
    found = Resolved.of(config)
    assert found.stored == config
    assert type(found.stored) is RunConfig
    assert json.loads(to_json(found)) == json.loads(to_json(config))
    assert Resolved.of(RunConfig(**json.loads(to_json(found)))) == found
    assert Resolved.of(found) == found
    assert config.stored is config


def test_clip_only_is_private_and_no_clip_is_not() -> None:
    """A noise multiplier of 0 clips; what a run clips to decides, not how loud its noise is."""
    clipped = Resolved.of(RunConfig(lr=0.1, clip=0.3, noise_multiplier=0.0))
    assert clipped.private
    assert dataclasses.replace(clipped, noise_multiplier=0.5).stored.noise_multiplier == 0.5
    assert not dataclasses.replace(clipped, clip=0.0).private
    assert dataclasses.replace(clipped, clip=0.0).stored.noise_multiplier is None


def test_a_change_of_resolved_settings_is_stored() -> None:
    config = Resolved.of(RunConfig(lr=0.1))
    for name, value in {"rho": 0.2, "quorum": 0.7, "server_momentum": 0.4, "projection": "sign"}.items():
        assert getattr(dataclasses.replace(config, **{name: value}).stored, name) == value


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"rho": -1.0}, "rho=-1.0"),
        ({"quorum": 0.0}, "quorum=0.0"),
        ({"clip": NAN}, "clip=nan"),
        ({"noise_multiplier": 0.5}, "clip=0.0"),
        ({"projection": None}, "projection=None"),
        ({"ball": 1.0, "sensitivity": 1.0}, "ball or sensitivity"),
    ],
)
def test_resolved_settings_are_neutral_or_valid(change: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        dataclasses.replace(Resolved.of(RunConfig(lr=0.1)), **change)


def test_settings_without_a_learning_rate_are_not_resolved() -> None:
    with pytest.raises(ConfigError, match="resolve the config"):
        Resolved.of(RunConfig())


def test_every_setting_explains_itself() -> None:
    for record in (RunConfig, Speed):
        for field in dataclasses.fields(record):
            assert len(field.metadata["help"]) > 5


def test_every_setting_is_in_one_group() -> None:
    assert sorted(name for group in GROUPS for name in group.settings) == sorted(FIELDS)
    assert [group.heading for group in GROUPS] == [
        *("Data", "Federation", "Local training", "Size of messages", "Privacy", "Security")
    ]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [("fedagv", "did you mean 'fedavg'"), ("xyz", "unknown algorithm 'xyz'; known: fedavg, fwc")],
)
def test_an_unknown_name_gets_a_suggestion_or_the_list(asked: str, answer: str) -> None:
    require_choice("algorithm", "fwc", ["fedavg", "fwc"])
    with pytest.raises(ConfigError, match=answer):
        require_choice("algorithm", asked, ["fedavg", "fwc"])


# --- TOML ----------------------------------------------------------------------------------------------------------


def toml(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_keys_may_be_written_with_either_dash(tmp_path: Path) -> None:
    path = toml(tmp_path, 'local-epochs = 3\nbatch_size = 5\nalgorithm = "fwc"')
    assert from_settings(RunConfig, read_toml(path, FIELDS)) == RunConfig(local_epochs=3, batch_size=5, algorithm="fwc")


@pytest.mark.parametrize(
    ("key", "meant"), [("clinets", "clients"), ("local-epoch", "local_epochs"), ("momentun", "momentum")]
)
def test_an_unknown_key_is_an_error_with_a_suggestion(key: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}', did you mean '{meant}'"):
        read_toml(toml(tmp_path, f"{key} = 3"), FIELDS)


def test_a_key_like_no_other_is_an_error_without_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'zzz'$"):
        read_toml(toml(tmp_path, "zzz = 3"), FIELDS)


@pytest.mark.parametrize("text", ["clients = ", "[", "clients = 3\nclients = 4", b"\xff\xfe", "= 1"])
def test_what_is_not_toml_is_refused(text: str | bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml"):
        read_toml(toml(tmp_path, text), FIELDS)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the config file"):
            read_toml(path, FIELDS)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("clients", "ten", "int"),
        ("clients", 2.5, "int"),
        ("clients", True, "int"),
        ("lr", "0.1", "float"),
        ("lr", False, "float"),
        ("algorithm", 3, "str"),
        ("rounds", [1], "int"),
        ("rounds", {"a": 1}, "int"),
    ],
)
def test_values_of_the_wrong_type_are_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.* expected {expected}"):
        from_settings(RunConfig, {name: value})


@given(st.integers(1, 1000))
def test_a_whole_number_will_do_where_any_is_meant(value: int) -> None:
    lr = from_settings(RunConfig, {"lr": value}).lr
    assert lr == value
    assert isinstance(lr, float)


# --- in Python -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[("clients", value, "int") for value in ("4", 4.0, None, True)],
        *[("rounds", value, "int") for value in (2.5, True, NAN)],
        ("local_epochs", None, "int"),
        ("seed", 1.5, "int"),
        ("train_examples", 100.5, "int"),
        ("lr", "0.1", "float"),
        ("momentum", True, "float"),
        ("algorithm", None, "str"),
        ("partition", None, "str"),
        ("secure_aggregation", "no", "bool"),
        ("secure_aggregation", 1, "bool"),
    ],
)
def test_a_config_made_in_python_is_checked_like_a_file(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value!r} is not valid: expected {expected}$"):
        RunConfig(**{name: value})
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(RunConfig(), **{name: value})


@pytest.mark.parametrize(("name", "value"), [("workers", 1.0), ("threads", "2"), ("device", 0), ("workers", True)])
def test_speed_made_in_python_is_checked_like_a_file(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value!r} is not valid: expected"):
        Speed(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    config = RunConfig(clients=np.int64(3), lr=np.float32(0.5), rho=np.int32(2), momentum=np.float64(0.5), clip=1)
    assert config == RunConfig(clients=3, lr=0.5, rho=2.0, momentum=0.5, clip=1.0)
    assert str(config) == str(RunConfig(clients=3, lr=0.5, rho=2.0, momentum=0.5, clip=1.0))  # as in the run's id
    assert json.loads(to_json(config))["clients"] == 3
