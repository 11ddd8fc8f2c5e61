"""Attacks: they see only what their adversary sees, and they succeed where nothing protects."""

import dataclasses
import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrp import RunConfig, simulate
from fedrp.attacks.experiment import attack_angles, attack_images, attack_keys, record_run
from fedrp.attacks.figures import write
from fedrp.attacks.inversion import Effort
from fedrp.attacks.keysearch import ROWS, keyed_guess, search, seeded_guess, seeded_matrix, typical_size
from fedrp.attacks.membership import attack_membership
from fedrp.attacks.metrics import area, matched, psnr, rate_at, roc, ssim
from fedrp.attacks.observations import angles, find_observations, opened_keys
from fedrp.attacks.outcome import Scenario
from fedrp.attacks.record import record
from fedrp.attacks.verdicts import image_verdict, membership_verdict
from fedrp.attacks.view import ADVERSARIES, Recording, View
from fedrp.cli import main
from fedrp.crypto.secret import SecretKey
from fedrp.errors import ConfigError, DataError, FedRPError
from fedrp.learning.data import Dataset, load_dataset
from fedrp.learning.initial import secret_initial
from fedrp.learning.layout import layout_of
from fedrp.learning.task import Task, named_task
from fedrp.projection.families import make_projection
from fedrp.protocol import wire
from fedrp.rng import RunSeed
from helpers import CLASSES, FEATURES, ROOT, TinyNet, all_windows, blobs, image_file, round_keys, tiny_config, windows

QUICK = Effort(iterations=60)
SMALL = Scenario(clients=3, targets=1, rounds=2)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset("mnist-mini")


@pytest.fixture(scope="module")
def recorded(dataset: Dataset) -> Callable[..., Recording]:
    def recorded(**changes: object) -> Recording:
        scenario = dataclasses.replace(SMALL, **changes)
        chosen = [np.arange(scenario.images) + scenario.images * client for client in range(scenario.clients)]
        return record_run(scenario, dataset, chosen)

    return recorded


# --- what a view holds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["fedrp", "fedrp-subspace"])
def test_the_servers_view_holds_no_key_no_model_and_no_row_of_the_matrix(
    algorithm: str, recorded: Callable[..., Recording]
) -> None:
    recording = recorded(algorithm=algorithm, dim=20, projection="gaussian")
    view = recording.view(ADVERSARIES["server"])
    assert view.insider is None
    seen = all_windows(packet.data for packet in view.packets)
    config = recording.public.config
    for key in round_keys(config):
        assert not windows(key.reveal()) & seen
        model = secret_initial(recording.public.model, key)
        assert not windows(model[:64].tobytes()) & seen
        row = make_projection("gaussian", key, model.size, 20).adjoint(np.eye(1, 20, dtype=np.float32)[0])
        assert not windows(row[:64].tobytes()) & seen


def test_a_client_sees_its_own_line_and_opens_its_own_envelopes(recorded: Callable[..., Recording]) -> None:
    recording = recorded(algorithm="fedrp-subspace", dim=20)
    view = recording.view(ADVERSARIES["client"], insider=2)
    assert {packet.client for packet in view.packets} == {2}
    assert opened_keys(view) == dict(enumerate(round_keys(recording.public.config)))
    uploads = view.messages(wire.Kind.UPLOAD)
    assert {message.sender for _, message in uploads} == {2}


def test_a_view_repeats_what_was_recorded(recorded: Callable[..., Recording]) -> None:
    first, second = (recorded(algorithm="fedavg").view(ADVERSARIES["server"]) for _ in range(2))
    assert first.packets == second.packets
    assert all(type(packet.data) is bytes for packet in first.packets)


@pytest.mark.parametrize(
    ("algorithm", "round_", "least"),
    [
        *[("fedavg", 1, 0.9999), ("fedrp", 1, 0.9999), ("fedrp-subspace", 1, 0.9999)],
        *[("fedrp-subspace", 2, 0.9999), ("fedrp", 2, 0.9)],  # the last: both steps, as if at the first model
    ],
)
def test_an_insider_knows_the_step_of_every_other_client(
    algorithm: str, round_: int, least: float, recorded: Callable[..., Recording], dataset: Dataset
) -> None:
    """What the observation says is what the client's image did: its gradient at the common model, behind the matrix."""
    recording = recorded(algorithm=algorithm, dim=50)
    observations = find_observations(recording.view(ADVERSARIES["server+client"]), RunSeed(0), round_)
    assert [observation.clients for observation in observations] == [(1,), (2,)]
    for observation in observations:
        (client,) = observation.clients
        module = recording.public.model()
        torch.nn.utils.vector_to_parameters(torch.from_numpy(observation.model.copy()), module.parameters())
        x = torch.from_numpy(dataset.normalised(dataset.train_x[client : client + 1]))
        loss = torch.nn.functional.cross_entropy(module(x), torch.from_numpy(dataset.train_y[client : client + 1]))
        loss.backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()]).numpy()
        expected = gradient if observation.projection is None else observation.projection.forward(gradient)
        cosine = -observation.update @ expected / np.linalg.norm(observation.update) / np.linalg.norm(expected)
        assert cosine > least
        assert not observation.guessed


def test_aggregates_tell_a_client_the_mean_of_the_others(recorded: Callable[..., Recording]) -> None:
    require_mean_of_others(recorded(algorithm="fedrp-subspace", dim=30), 1)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg-dp"])
def test_momentum_over_rounds_hides_nothing_from_a_client(algorithm: str) -> None:
    config = tiny_config(algorithm, clients=3, rounds=4, server_momentum=0.5)
    task = Task(TinyNet, [blobs(8, client) for client in range(3)], blobs(1))
    require_mean_of_others(record(config, task, (FEATURES,), CLASSES, 0.0, 1.0), 3)


def require_mean_of_others(recording: Recording, round_: int) -> None:
    insider = find_observations(recording.view(ADVERSARIES["server+client"]), RunSeed(0), round_)
    everyone = {c.clients: c.update for c in insider}
    (observation,) = find_observations(recording.view(ADVERSARIES["client"]), RunSeed(0), round_)
    assert observation.clients == (1, 2)
    np.testing.assert_allclose(observation.update, (everyone[(1,)] + everyone[(2,)]) / 2, atol=1e-6)


def test_without_keys_model_and_matrix_are_guesses(recorded: Callable[..., Recording]) -> None:
    view = recorded(algorithm="fedrp-subspace", dim=30).view(ADVERSARIES["server"])
    one, two = (find_observations(view, RunSeed(guess))[0] for guess in (1, 2))
    assert one.guessed
    assert two.guessed
    assert not np.allclose(one.model, two.model)
    assert not np.allclose(one.update, two.update)  # the rotation is guessed, too; it keeps lengths
    assert np.linalg.norm(one.update) == pytest.approx(np.linalg.norm(two.update), rel=1e-4)


# --- inversion -------------------------------------------------------------------------------------------------------


def test_fedavg_gives_a_single_image_away() -> None:
    outcome = attack_images(SMALL, QUICK)
    assert min(outcome.psnr) > 25
    assert outcome.label_rate == 1
    assert outcome.targets[0].ssim[0] > 0.95
    assert max(outcome.mean_image) < 15


def test_with_the_matrix_a_thousand_numbers_give_it_away_too() -> None:
    scenario = dataclasses.replace(SMALL, algorithm="fedrp-subspace", adversary="server+client", projection="sign")
    outcome = attack_images(scenario, QUICK)
    assert min(outcome.psnr) > 25
    assert outcome.label_rate == 1


@pytest.mark.parametrize("algorithm", ["fedrp", "fedrp-subspace"])
def test_without_the_matrix_the_mean_image_is_the_better_guess(algorithm: str) -> None:
    scenario = dataclasses.replace(SMALL, algorithm=algorithm, projection="sign", targets=3, dim=500)
    outcome = attack_images(scenario, Effort(iterations=30))
    assert outcome.guessed
    assert max(outcome.psnr) < np.mean(outcome.mean_image)


def test_noise_hides_the_image_from_the_server() -> None:
    outcome = attack_images(dataclasses.replace(SMALL, algorithm="fedavg-dp"), Effort(iterations=30))
    assert max(outcome.psnr) < np.mean(outcome.mean_image)


def test_an_outcome_is_written_as_images_and_json(tmp_path: Path) -> None:
    outcome = attack_images(SMALL, Effort(iterations=2))
    write(outcome, tmp_path / "new")
    kept = json.loads((tmp_path / "new" / "result.json").read_text())
    assert (kept["algorithm"], kept["adversary"], kept["psnr_each"]) == (
        "fedavg",
        "server",
        [round(outcome.psnr[0], 2)],
    )
    assert (tmp_path / "new" / "images.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"algorithm": "fwc"}, ConfigError, "unknown algorithm to attack 'fwc'"),
        ({"adversary": "me"}, ConfigError, "unknown adversary 'me'"),
        ({"clients": 1, "adversary": "client"}, ConfigError, "clients=1"),
        ({"clients": 0}, ConfigError, "clients=0"),
        ({"round": 3}, ConfigError, "round=3"),
        ({"round": 2, "joined": 3}, ConfigError, "joined=3"),
        ({"model": "lenet"}, ConfigError, "unknown model 'lenet'"),
        ({"clients": 10_001}, DataError, "not so many images"),
    ],
)
def test_mistakes_are_named(changes: dict[str, object], error: type[FedRPError], told: str) -> None:
    with pytest.raises(error, match=told):
        attack_images(dataclasses.replace(SMALL, **changes), Effort(iterations=1))


@pytest.mark.slow
def test_a_later_round_of_fedavg_is_no_safer() -> None:
    outcome = attack_images(dataclasses.replace(SMALL, rounds=4, round=3), Effort())
    assert min(outcome.psnr) > 25


@pytest.mark.slow
def test_rounds_add_up_until_a_small_matrix_gives_the_image_away() -> None:
    few = Scenario("fedrp-subspace", "server+client", clients=2, targets=1, dim=200, projection="sign", rounds=5)
    (one,) = attack_images(few, Effort()).psnr
    (four,) = attack_images(dataclasses.replace(few, round=4, joined=4), Effort()).psnr
    assert one < 20
    assert four > 25


@pytest.mark.slow
def test_of_two_clients_each_reads_the_other() -> None:
    scenario = Scenario("fedrp-subspace", "client", clients=2, rounds=2, projection="sign")
    assert min(attack_images(scenario, Effort()).psnr) > 25


def test_a_dense_layer_gives_its_input_away(recorded: Callable[..., Recording], dataset: Dataset) -> None:
    """Also where pixels are hard to get: weight gradient by bias gradient is the layer's input, from one image."""
    recording = recorded(model="lenet5")
    observation = find_observations(recording.view(ADVERSARIES["server"]), RunSeed(0))[0]
    module = recording.public.model()
    layout = layout_of(module)
    step = dict(zip(layout.names, layout.views(torch.from_numpy(observation.update)), strict=True))
    weight, bias = step["7.weight"], step["7.bias"]
    found = (weight * bias[:, None]).sum(dim=0) / bias.square().sum()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(observation.model.copy()), module.parameters())
    with torch.no_grad():
        truth = module[:7](torch.from_numpy(dataset.normalised(dataset.train_x[:1])))[0].double()
    assert float((found - truth).norm() / truth.norm()) < 1e-3


# --- angles ----------------------------------------------------------------------------------------------------------


def test_angles_survive_the_matrix(recorded: Callable[..., Recording]) -> None:
    secret = recorded(algorithm="fedrp-subspace", dim=2000, projection="sign")
    known = find_observations(secret.view(ADVERSARIES["server+client"]), RunSeed(0))
    cosine = known[0].update @ known[1].update / np.linalg.norm(known[0].update) / np.linalg.norm(known[1].update)
    assert angles(secret.view(ADVERSARIES["server"]))[1, 2] == pytest.approx(cosine)


@pytest.mark.slow
def test_the_server_alone_can_group_clients_by_class_but_not_name_the_classes() -> None:
    links = attack_angles(Scenario("fedrp-subspace", clients=40, rounds=2))
    assert links.same_class.low > 0.9
    assert links.label_rate < 0.5
    assert links.psnr < links.psnr_mean_image + 0.5


# --- likeness --------------------------------------------------------------------------------------------------------


def test_psnr_of_a_known_error() -> None:
    image = np.full((1, 8, 8), 0.5)
    assert psnr(image, image + 0.1) == pytest.approx(20)
    assert psnr(image, image) == 100


def test_ssim_of_flat_images_is_their_luminance_term() -> None:
    """Without contrast only the means are left: (2ab + c1) / (a^2 + b^2 + c1), by hand."""
    a, b = np.full((1, 16, 16), 0.2), np.full((1, 16, 16), 0.6)
    assert ssim(a, b) == pytest.approx((2 * 0.12 + 1e-4) / (0.04 + 0.36 + 1e-4))


def test_ssim_of_a_contrast_change_by_hand() -> None:
    """A chequerboard around its mean: in the middle of a large board the window sees mean 1/2 and variance s^2."""
    board = np.indices((64, 64)).sum(axis=0)[None] % 2 - 0.5
    values = [ssim(0.5 + 0.8 * board, 0.5 + scale * 0.8 * board) for scale in (1, 0.5, -1)]
    c2 = 0.03**2
    expected = [(2 * s * 0.16 + c2) / (0.16 + s**2 * 0.16 + c2) for s in (1, 0.5, -1)]
    assert values == pytest.approx(expected, abs=5e-3)


def test_ssim_is_symmetric_and_falls_with_noise() -> None:
    rng = np.random.default_rng(0)
    image = load_dataset("mnist-mini").train_x[0] / 255.0
    noisy = [image + rng.normal(0, deviation, image.shape) for deviation in (0.05, 0.2, 0.8)]
    values = [ssim(image, other) for other in noisy]
    assert ssim(image, image) == pytest.approx(1)
    assert values == sorted(values, reverse=True)
    assert ssim(noisy[1], image) == pytest.approx(values[1])


def test_reconstructions_are_paired_with_their_originals() -> None:
    images = np.random.default_rng(0).random((5, 1, 6, 6))
    order = np.array([3, 1, 4, 0, 2])
    assert np.array_equal(images[order][matched(images, images[order])], images)


def test_area_of_random_scores_is_a_half_and_its_interval_covers_it() -> None:
    rng = np.random.default_rng(0)
    areas = [area(rng.random(200), rng.random(150)) for _ in range(200)]
    assert np.mean([a.auc for a in areas]) == pytest.approx(0.5, abs=0.01)
    assert 0.9 <= np.mean([a.low <= 0.5 <= a.high for a in areas]) <= 0.99


def test_area_counts_pairs() -> None:
    assert area(np.array([2.0, 3.0]), np.array([1.0, 2.0])).auc == pytest.approx((1 + 0.5 + 1 + 1) / 4)
    assert area(np.array([2.0]), np.array([1.0])) == (1, 1, 1)
    scores = np.arange(1000.0)
    rate = rate_at(scores, scores, 0.01)
    assert rate.found == pytest.approx(0.01)
    # Clopper and Pearson of 10 in 1,000: beta quantiles, as in tables
    assert (rate.low, rate.false_high) == pytest.approx((0.0048, 0.0183), abs=1e-4)


def test_a_curve_has_the_area_that_is_stated() -> None:
    rng = np.random.default_rng(0)
    for positive, negative in ((rng.normal(1, 1, 300), rng.normal(0, 1, 200)), (np.ones(3), np.array([1.0, 0.0]))):
        curve = roc(positive, negative)
        assert (curve.false_positives[0], curve.true_positives[0]) == (0, 0)
        assert (curve.false_positives[-1], curve.true_positives[-1]) == (1, 1)
        assert np.trapezoid(curve.true_positives, curve.false_positives) == pytest.approx(area(positive, negative).auc)


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("psnr", "told"),
    [
        ((40.0, 16.0, 11.0), "IMAGES READ: 1 of 3 at 25 dB or more, 1 more in part; 50% of labels found"),
        ((16.0, 11.0, 14.9), "IMAGES READ IN PART: 1 of 3 are 3 dB above the mean public image; 50% of labels found"),
        ((9.0, 11.0, 14.9), "no image read: none is 3 dB above the mean public image; 50% of labels found; a better"),
    ],
)
def test_a_reconstruction_is_held_against_the_mean_image(psnr: tuple[float, ...], told: str) -> None:
    assert image_verdict(psnr, (12.0, 12.0, 12.0), 0.5).startswith(told)


def test_the_verdicts_fit_what_the_page_says_of_kept_attacks() -> None:
    """docs/attacks.md, "Inversion": read from FedAvg, in part at m = 200, not through noise."""
    read, partly, nothing = "IMAGES READ: ", "IMAGES READ IN PART: ", "no image read: "
    expected = {
        **dict.fromkeys(("fedavg-server", "fedrp-insider", "subspace-insider-1000", "fedavg-batch-4"), read),
        **dict.fromkeys(("subspace-insider-200", "fedavg-client-10"), partly),
        **dict.fromkeys(("fedrp-server", "subspace-server", "fedavg-dp-server", "subspace-insider-dp"), nothing),
    }
    kept = map(json.loads, (ROOT / "benchmarks/results/attacks.jsonl").read_text().splitlines())
    found = {
        line["options"].split()[-1]: image_verdict(
            line["result"]["psnr_each"],
            [line["result"]["psnr_mean_image"]] * len(line["result"]["psnr_each"]),
            line["result"]["label_rate"],
        )
        for line in kept
        if "psnr_each" in line["result"]
    }
    for name, told in expected.items():
        assert found[name].startswith(told), (name, found[name])


@pytest.mark.parametrize(
    ("auc", "low", "sure", "told"),
    [
        (
            0.60,
            0.55,
            0.01,
            "MEMBERS TOLD FROM OTHERS: AUC 0.600 (0.550 to 0.650, second); 4.0% of members named at 1 %",
        ),
        (0.53, 0.51, 0.01, "members hardly told from others, training and test set may just differ: AUC 0.530"),
        (0.52, 0.49, 0.01, "members not told from others: AUC 0.520 (0.490 to 0.550, second), 0.5 is guessing"),
        (0.52, 0.49, 0.05, "SOME MEMBERS TOLD FROM OTHERS: 4.0% of members named at 1 % false alarms, 0.5% at 0.1 %"),
        (0.60, 0.55, 0.05, "MEMBERS TOLD FROM OTHERS"),
    ],
)
def test_membership_is_told_beyond_chance_and_beyond_a_shift(auc: float, low: float, sure: float, told: str) -> None:
    best = {"auc": auc, "auc_low": low, "auc_high": 2 * auc - low}
    rates = {"tpr_at_1_percent_fpr": 0.04, "tpr_low": sure, "fpr_high": 0.02, "tpr_at_1_per_mille_fpr": 0.005}
    first = {**best, **rates, "auc": 0.5, "tpr_low": 0.0}
    assert membership_verdict({"first": first, "second": best | rates}).startswith(told)


# --- membership ------------------------------------------------------------------------------------------------------


def test_a_model_that_learned_noise_by_heart_gives_its_members_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 60), ("test", 120)):  # labels at random: nothing to learn but the members themselves
        arrays |= {f"x_{part}": rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)}
        arrays |= {f"y_{part}": np.concatenate([np.arange(3), rng.integers(0, 3, count - 3)])}
    np.savez(tmp_path / "noise.npz", **arrays)
    config = RunConfig("fedavg", f"npz:{tmp_path / 'noise.npz'}", clients=2, rounds=8, local_epochs=5, batch_size=10)
    simulate(config, named_task(config), out=tmp_path / "run")
    found = attack_membership(tmp_path / "run", references=1).as_json()
    assert found["loss"]["auc"] > 0.6
    assert found["calibrated"]["auc"] > 0.6
    assert found["members"] == found["non_members"] == 60
    assert found["mean_loss_members"] < found["mean_loss_non_members"]
    assert found["verdict"].startswith("MEMBERS TOLD FROM OTHERS")
    main(["attack", "membership", str(tmp_path / "run"), "--references=0", f"--out={tmp_path / 'attack'}"])
    told = json.loads((tmp_path / "attack" / "result.json").read_text())
    assert f"verdict                      {told['verdict']}\n" in capsys.readouterr().out
    assert (tmp_path / "attack" / "roc.png").read_bytes().startswith(b"\x89PNG")


def test_where_every_client_keeps_its_model_members_are_that_clients(tmp_path: Path) -> None:
    config = RunConfig("fwc", f"npz:{image_file(tmp_path / 'images.npz')}", clients=3, rounds=1)
    simulate(config, named_task(config), out=tmp_path / "run")
    found = attack_membership(tmp_path / "run", references=0).as_json()
    assert found["members_of"] == "the client whose model is delivered"
    assert found["members"] == 15
    assert "calibrated" not in found


def test_the_gallery_shows_each_image_with_its_own_label(dataset: Dataset) -> None:
    (target,) = attack_images(dataclasses.replace(SMALL, images=4), Effort(iterations=2)).targets
    for image, label in zip(target.originals, target.labels, strict=True):
        same = (dataset.train_x / 255.0 == image).all(axis=(1, 2, 3))
        assert dataset.train_y[same].tolist() == [label]
    assert len(target.labels_found) == len(target.found) == 4


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a run"):
        attack_membership(tmp_path)


# --- key search ------------------------------------------------------------------------------------------------------


def test_a_seed_is_found_from_a_model_that_has_moved() -> None:
    rng = np.random.default_rng(0)
    model = rng.normal(0, 1, 1003).astype(np.float32)
    moved = model + rng.normal(0, 0.01, model.size).astype(np.float32)
    seen = seeded_matrix(1234, ROWS, model.size) @ moved
    found = search(range(4000), seeded_guess(model, ROWS), seen, typical_size(model, ROWS))
    assert (found.found, found.tried) == (1234, 1235)


def test_a_seed_beyond_32_bits_is_no_other_seed() -> None:
    """Why seeds are no keys: torch keeps 32 bits of what it is given."""
    assert np.array_equal(seeded_matrix(5, 3, 40), seeded_matrix(5 + 2**32, 3, 40))


def test_rows_drawn_one_by_one_are_those_of_the_matrix() -> None:
    model = np.random.default_rng(0).normal(0, 1, 333).astype(np.float32)
    expected = seeded_matrix(7, ROWS, model.size) @ model
    np.testing.assert_allclose(list(seeded_guess(model, ROWS)(7)), expected, rtol=1e-4)


def test_a_real_key_is_recognised_but_not_found() -> None:
    model = np.random.default_rng(0).normal(0, 1, 500).astype(np.float32)
    key = SecretKey(bytes(range(32)))
    seen = make_projection("gaussian", key, model.size, ROWS).forward(model).astype(np.float64)
    guess, typical = keyed_guess(model, ROWS, "gaussian"), typical_size(model, ROWS)
    number = int.from_bytes(key.reveal(), "big")
    assert search([number], guess, seen, typical).found == number
    missed = search(itertools.count(), guess, seen, typical, budget=0.2)
    assert missed.found is None
    assert missed.tried > 10


def test_the_key_search_from_start_to_end() -> None:
    found = attack_keys(bits=4)
    assert found["seed_found"]
    assert found["true_key_would_be_recognised"]
    assert not found["key_found"]
    assert found["verdict"].startswith(f"SEED FOUND after {found['seeds_tried']} tries; key not found after")


# --- the command line ------------------------------------------------------------------------------------------------


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["attack", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return (code, *capsys.readouterr())


def test_inversion_prints_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = ["--targets=1", "--clients=2", "--rounds=2", "--iterations=2"]
    code, out, _ = ask(capsys, "inversion", *few, f"--out={tmp_path}", "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "result.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inversion", "--algorithm=fedagv"], "unknown algorithm 'fedagv', did you mean 'fedavg'"),
        (["inversion", "--adversary=sever"], "unknown adversary 'sever', did you mean 'server'"),
        (["inversion", "--method=sgd", "--rounds=2", "--clients=2"], "unknown method 'sgd'"),
        (["inversion", "--restarts=0"], "restarts=0 is not valid: expected a whole number of at least 1"),
        (["inversion", "--iterations=0"], "iterations=0 is not valid"),
        (["inversion", "--smoothness=nan"], "smoothness=nan is not valid: expected a number of at least 0"),
        (["membership", "/nowhere", "--references=-1"], "references=-1 is not valid"),
        (
            ["membership", "/nowhere", "--shadows=2"],
            "shadows=2 is not valid: expected 0, or an even number of at least 4",
        ),
        (["membership", "/nowhere", "--shadows=5"], "shadows=5 is not valid"),
        (["membership", "/nowhere"], "/nowhere is not the folder of a run"),
        (["key-search", "--bits=33"], "bits=33 is not valid"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, *arguments)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_no_secret_is_shown(recorded: Callable[..., Recording]) -> None:
    recording = recorded(algorithm="fedrp", dim=20)
    view: View = recording.view(ADVERSARIES["server+client"])
    for key in round_keys(recording.public.config):
        assert key.reveal().hex() not in repr(view.insider)
        assert repr(key.reveal()) not in repr(view.insider)
    assert not {field.name for field in dataclasses.fields(View)} & {"task", "data", "sites", "clients"}


# --- what is published -----------------------------------------------------------------------------------------------


def test_a_published_attack_is_run_again_by_its_name_and_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    attacks = importlib.import_module("attacks")
    done: list[str] = []

    def job(name: str) -> dict[str, object]:
        done.append(name)
        return {"psnr": len(done)}

    before = {"old": {"origin": {"date": "long ago"}, "psnr": 0}, "again": {"psnr": 0}}
    monkeypatch.setattr(attacks, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(attacks, "JOBS", dict.fromkeys(["old", "again", "new"], job))
    monkeypatch.setattr(attacks, "WORK", tmp_path / "work")
    attacks.kept.keep(attacks.TABLE, {attacks.command_of(name): before[name] for name in before}, attacks.KEPT)
    for names in ([], [], ["again"], ["again"]):
        attacks.run(names)
    assert done == ["new", "again", "again"]
    results = attacks.keep_all()
    assert results["old"] == before["old"]
    assert results["again"]["psnr"] == 3
    assert results["again"]["origin"]["command"] == "python benchmarks/attacks.py run again"
    assert set(results["new"]["origin"]) == {"command", "commit", "date", "machine"}
