"""The package, docs/protocol.md and an oracle that imports neither agree on tests/vectors/protocol.json, to the bit."""

import ast
import dataclasses
import functools
import hashlib
import json
import re

import numpy as np
import pytest

import make_protocol_vectors as maker
from fedrp.algorithms.client_side import own_normals, own_words
from fedrp.algorithms.pipeline import Pipeline
from fedrp.algorithms.resolve import resolved
from fedrp.algorithms.servers import SERVERS, server_side, wire_tag
from fedrp.algorithms.subspace import fingerprint
from fedrp.algorithms.table import ALGORITHMS
from fedrp.compression import grid
from fedrp.compression.coding import aggregate_coding_of, upload_coding_of
from fedrp.compression.eden import Scalar, Trellis
from fedrp.compression.grid import HEADROOM, Scale, finest
from fedrp.config import Resolved, RunConfig
from fedrp.config.toml import settings_digest
from fedrp.crypto.epochs import covering
from fedrp.crypto.masks import Masker, extended
from fedrp.crypto.roster import Entry, Roster
from fedrp.crypto.schedule import round_key
from fedrp.crypto.sealing import Identity, MaskKey, Place, mask_key_of, proves, signed_mask_key, verify
from fedrp.crypto.secret import SecretKey
from fedrp.crypto.secure_aggregation import Cohort
from fedrp.errors import ProtocolError
from fedrp.learning.initial import drawn_initial, initial_laws
from fedrp.mechanisms.base import AtClient
from fedrp.mechanisms.delivery import stage
from fedrp.projection.families import FAMILIES
from fedrp.projection.tags import projection_tag
from fedrp.protocol import limits, wire
from fedrp.protocol.wire import Kind, Message
from helpers import ROOT, clipped_and_noised

VECTORS = json.loads(maker.FILE.read_text())
PAGE = (ROOT / "docs" / "protocol.md").read_text()
SOURCE = ROOT / "src" / "fedrp"


def every(section):
    return pytest.mark.parametrize("case", VECTORS[section])


def raw(text):
    return bytes.fromhex(text)


def secret(text):
    return SecretKey(raw(text)) if text else None


def floats(texts, dtype=np.float64):
    return np.array([float.fromhex(text) for text in texts], dtype)


def never_asked():
    raise AssertionError("there is no noise, and nothing is rounded by coins")


def identities():
    return [Identity(secret(case["secret"]), case["name"]) for case in VECTORS["identities"]]


# --- the oracle ------------------------------------------------------------------------------------------------------


def test_the_oracle_makes_the_vectors_again():
    assert maker.text() == maker.FILE.read_text()


@pytest.mark.parametrize(
    "name", ["support/oracles/protocol.py", "support/oracles/projection.py", "vectors/make_protocol_vectors.py"]
)
def test_the_oracle_does_not_import_the_package(name):
    tree = ast.parse((ROOT / "tests" / name).read_text())
    taken = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    taken |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert taken
    assert not [module for module in taken if module.split(".")[0] == "fedrp"]


# --- the package -----------------------------------------------------------------------------------------------------


@every("identities")
def test_public_keys_and_entries_come_from_one_secret(case):
    identity = Identity(secret(case["secret"]), case["name"])
    keys, member = identity.public, Entry.of(identity)
    assert (keys.x25519.hex(), keys.ed25519.hex()) == (case["x25519"], case["ed25519"])
    assert hashlib.sha256(keys.hybrid).hexdigest() == case["hybrid_sha256"]
    assert (member.digest.hex(), member.proof.hex()) == (case["entry_digest"], case["proof"])
    assert proves(keys, member.digest, raw(case["proof"]))


def test_the_digest_of_the_roster_is_that_of_its_entries():
    roster = Roster(tuple(Entry.of(identity) for identity in identities()))
    assert roster.digest.hex() == VECTORS["roster"][0]["digest"]


@every("envelopes")
def test_an_envelope_verifies_and_opens_in_its_place_alone(case):
    place = Place(raw(case["run"]), 3, 1, 2, projection_tag("sign"), raw(case["roster"]), case["sealing"])
    assert place.projection == case["projection"]
    assert place.encoded().hex() == case["place"]
    envelope, everyone = raw(case["envelope"]), identities()
    verify(envelope, everyone[1].public, place)
    assert everyone[2].open(envelope, place) == secret(case["secret"])
    elsewhere = place._replace(round=4)
    with pytest.raises(ProtocolError):
        verify(envelope, everyone[1].public, elsewhere)
    with pytest.raises(ProtocolError):
        everyone[2].open(envelope, elsewhere)
    with pytest.raises(ProtocolError):
        everyone[3].open(envelope, place)


@every("round_keys")
def test_round_keys_come_from_the_secrets_of_the_set_up_and_of_their_epoch(case):
    secrets = {dealt["first"]: secret(dealt["secret"]) for dealt in case["secrets"]}
    for round_, expected in enumerate(case["round_keys"]):
        first = covering(secrets, round_)
        assert round_key(secrets[0], first, secrets[first], round_) == secret(expected)


@every("mask_keys")
def test_a_mask_key_is_signed_for_its_run_roster_and_client(case):
    identity, key = Identity(secret(case["identity"])), MaskKey(secret(case["mask_secret"]))
    place = (maker.RUN, raw(VECTORS["roster"][0]["digest"]), case["client"])
    assert signed_mask_key(key, identity, *place).hex() == case["signed"]
    assert mask_key_of(raw(case["signed"]), identity.public.ed25519, *place) == key.public


@every("settings")
def test_the_digest_of_the_settings_is_that_of_all_of_them(case):
    config = RunConfig(**json.loads(case["settings"]))
    assert settings_digest(config).hex() == case["digest"]
    assert json.loads(case["settings"]).keys() == dataclasses.asdict(config).keys()
    lower = dataclasses.replace(config, noise_multiplier=1.2345678901 * (1 + 1e-12))
    assert settings_digest(lower) == settings_digest(config)  # as machines may round differently


@every("transcripts")
def test_a_transcript_digest_grows_by_what_was_applied(case):
    digest = raw(case["settings"])
    for step in case["steps"]:
        aggregate = None if step["aggregate"] is None else floats(step["aggregate"], np.float32)
        digest = extended(digest, step["applied_in"], step["past"], aggregate, secret(step["round_key"]))
        assert digest.hex() == step["digest"]


def maskers_of(case):
    """The clients of a round."""
    call = Cohort(tuple(case["clients"]), tuple(case["weights"]))
    keys = [MaskKey(secret(text)) for text in case["mask_secrets"]]
    peers = np.array([list(key.public) for key in keys], np.uint8)
    place = (raw(case["run"]), case["round"], call, raw(case["transcript"]), secret(case["round_key"]))
    return [Masker(key, peers, raw(case["roster"]), client, *place) for client, key in enumerate(keys)]


@every("masks")
def test_masked_uploads_their_sum_and_a_recovery(case):
    call = Cohort(tuple(case["clients"]), tuple(case["weights"]))
    scale = finest(float.fromhex(case["bound"]), call, HEADROOM)
    assert scale == Scale(float.fromhex(case["bound"]), float.fromhex(case["step"]))
    maskers, uploads = maskers_of(case), []
    for client, masker in enumerate(maskers):
        words, _ = grid.encode(floats(case["vectors"][client]), scale, call.weights[client])
        assert words.tolist() == case["encoded"][client]
        uploads.append(masker.masked(words))
        assert uploads[-1].tolist() == case["uploads"][client]
    whole = grid.decode(np.sum(uploads, axis=0, dtype=np.uint32), sum(call.weights), scale.step)
    assert np.array_equal(whole, floats(case["mean"], np.float32))
    rest = np.zeros(5, np.uint32)
    for client in (0, 3):
        correction = maskers[client].correction(tuple(case["left_out"]), 5)
        assert correction.tolist() == case["corrections"][str(client)]
        rest += uploads[client] - correction
    kept = grid.decode(rest, call.weight_of((0, 3)), scale.step)
    assert np.array_equal(kept, floats(case["mean_of_the_rest"], np.float32))


@every("masks")
def test_the_mask_of_a_pair_is_what_one_adds_and_the_other_subtracts(case):
    one, two = maskers_of(case)[:2]
    added, subtracted = (m._added(np.zeros(5, np.uint32), (o.client,), b"upload") for m, o in ((one, two), (two, one)))
    assert added.tolist() == case["mask_of_0_and_1"]
    assert not (added + subtracted).any()


@every("few_bits")
def test_the_vector_of_a_payload_of_few_bits(case):
    bits = float(case["bits"])
    coding = (aggregate_coding_of if case["window"] == 12 else upload_coding_of)(case["size"], bits)
    assert (coding.quantiser == Trellis(case["window"])) if case["window"] else (coding.quantiser == Scalar())
    payload = np.frombuffer(bytes.fromhex(case["payload"]), np.uint8)
    found = coding.decode(payload, bytes.fromhex(case["place"]))
    np.testing.assert_allclose(found, floats(case["vector"]), atol=1e-6)


@every("levels")
def test_words_of_few_bits_their_payload_and_their_mean(case):
    vectors, cohort = [floats(vector) for vector in case["vectors"]], Cohort((0, 1, 2), (1, 1, 1))
    size, most = vectors[0].size, float.fromhex(case["secure_range"])
    given = {"algorithm": "fedrp-subspace", "clients": case["most_clients"], "dim": size, "bits": float(case["bits"])}
    config = resolved(RunConfig(**given, secure_aggregation=True, secure_range=most), 99)
    pipeline = Pipeline.of(config, SERVERS["fedrp-subspace"])
    norm = None if case["norm"] is None else float.fromhex(case["norm"])
    previous = None if norm is None else np.array([*[0.0] * size, norm], np.float32)
    coding, sent = pipeline.upload_coding(pipeline.upload_size(99)), []
    for key, vector in zip(case["noise_keys"], vectors, strict=True):
        noise = functools.partial(secret, key)
        context = AtClient(previous, 3, own_normals(noise), own_words(noise), lambda _text: None, cohort)
        sent.append(pipeline.sent(vector.astype(np.float32), context))
    assert [words.tolist() for words in sent] == case["words"]
    assert (coding.width, coding.encode(sent[0], b"").tobytes().hex()) == (case["width"], case["payload"])
    total = np.sum(sent, axis=0, dtype=np.uint32)
    mean = pipeline.aggregate([] if previous is None else [previous], total, 3.0, cohort)
    told = np.mean([np.linalg.norm(vector) for vector in vectors])
    assert mean[-1] == pytest.approx(told, rel=1e-5)
    steps = (2 ** case["width"] - 1) // 3
    bound = (2 + np.log2(steps) / 3) * (told if norm is None else norm) / np.sqrt(size)
    there = bound * (2 * np.sum(case["words"], axis=0)[:size] / steps - 3) / 3
    np.testing.assert_allclose(maker.oracle.spread(mean[:-1].tolist(), b"masked"), there, atol=1e-5)


@every("model_marks")
def test_a_model_mark_is_keyed_by_the_round(case):
    model = floats(case["model"], np.float32)
    assert fingerprint(case["family"], secret(case["round_key"]), model).hex() == case["mark"]
    assert {FAMILIES[entry["family"]].same_bits for entry in VECTORS["model_marks"]} == {True, False}


@every("initial_models")
def test_an_initial_model_is_drawn_from_the_key_of_the_set_up(case):
    import torch

    builds = iter([case["first"], case["second"]])

    def factory():
        module = torch.nn.Module()
        for number, values in enumerate(next(builds)):
            module.register_parameter(str(number), torch.nn.Parameter(torch.from_numpy(floats(values, np.float32))))
        return module

    template, laws = initial_laws(factory)
    assert [[law.part.stop - law.part.start, float(law.mean).hex(), float(law.spread).hex()] for law in laws] == [
        [size, mean, spread] for size, mean, spread in case["laws"]
    ]
    assert np.array_equal(drawn_initial(template, laws, secret(case["round_key"])), floats(case["model"], np.float32))


@every("noise")
def test_noise_comes_from_the_identity_and_the_packet_and_lies_on_a_grid(case):
    identity = Identity(secret(case["identity"]))
    digest = hashlib.sha256(raw(case["packet"])).digest()
    key = identity.noise_key(raw(case["run"]), case["round"], digest)
    assert key == secret(case["key"])
    np.testing.assert_allclose(key.fine_normals(8), floats(case["normals"]), rtol=1e-13)
    update = floats(case["update"], np.float32)
    for upload in case["uploads"]:
        settings = {n: float.fromhex(v) if n in maker.FLOATS and v else v for n, v in upload["settings"].items()}
        config = Resolved.of(RunConfig(algorithm="fedavg-dp", lr=0.1, **settings))
        sent = clipped_and_noised(config, update, key, upload["participants"])
        assert sent.tolist() == floats(upload["sent"]).tolist()
        assert not (sent / float.fromhex(upload["step"]) % 1).any()


@every("final_means")
def test_the_mean_of_final_models_is_a_masked_round_more(case):
    """From what the run's settings say of the exchange to the messages of round T + 1."""
    rounds = Resolved.of(RunConfig(**json.loads(case["settings"])))
    config = stage(rounds, case["round"])
    assert (config.rounds, config.secure_aggregation, config.before) == (case["round"], True, rounds)
    side, cohort = server_side(config), Cohort((0, 1, 2, 3), (1, 1, 1, 1))
    pipeline, own = Pipeline.of(config, side), side.memory == "own"
    assert side.memory == case["memory"]
    assert (config.weighting, config.participation) == ("uniform", 1.0)
    transcript = settings_digest(rounds)
    for step in case["steps"]:
        aggregate = None if step["aggregate"] is None else floats(step["aggregate"], np.float32)
        transcript = extended(transcript, step["applied_in"], step["past"], aggregate, secret(step["round_key"]))
    assert transcript.hex() == case["transcript"]
    maskers = maskers_of({**case, "clients": cohort.clients, "weights": cohort.weights})
    context, total = wire.context_of(raw(case["run"]), wire_tag(config)), np.zeros(5, np.uint32)
    assert context.hex() == case["context"]
    for client, masker in enumerate(maskers):
        model = floats(case["models"][client], np.float32)
        at_client = AtClient(None, 4, never_asked, never_asked, lambda _text: None, cohort)
        words = pipeline.sent(model, at_client)
        assert words.tolist() == case["encoded"][client]
        masked = masker.masked(words)
        total += masked
        mark = transcript[:4] if own else bytes(4)
        upload = Message(Kind.UPLOAD, context, case["round"], client, masked, 1, mark)
        assert wire.encode([upload]).hex() == case["uploads"][client]
    mean = pipeline.aggregate([], total, 4.0, cohort)
    assert np.array_equal(mean, floats(case["mean"], np.float32))
    told = {
        "asked": Message(Kind.ROUND, context, case["round"], wire.SERVER, cohort.payload(), 4),
        "aggregate": Message(Kind.AGGREGATE, context, case["round"], wire.SERVER, mean),
        "finish": Message(Kind.FINISH, context, case["round"], wire.SERVER, wire.EMPTY),
    }
    assert {name: wire.encode([message]).hex() for name, message in told.items()} == {n: case[n] for n in told}


@every("contexts")
def test_a_context_stands_for_a_run_and_a_projection(case):
    assert wire.context_of(raw(case["run"]), case["projection"]).hex() == case["context"]


@every("wire")
def test_a_message_of_each_kind_to_bytes_and_back(case):
    items = case["items"]
    payload = {
        0: lambda: wire.raw(raw(items)),
        1: lambda: floats(items, "<f4"),
        2: lambda: np.array(items, "<u4"),
    }[case["dtype"]]()
    fields = (raw(case["context"]), case["round"], case["sender"], payload, case["weight"])
    message = Message(Kind[case["kind"]], *fields, raw(case["fingerprint"]))
    assert message.kind == case["code"]
    assert wire.encode([message]).hex() == case["encoded"]
    assert wire.decode(raw(case["encoded"])) == [message]


def test_there_is_a_message_of_every_kind():
    assert [case["kind"] for case in VECTORS["wire"]] == [kind.name for kind in Kind]


# --- the page --------------------------------------------------------------------------------------------------------


def below(heading):
    """The text between a heading and the next one."""
    (part,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return part


def table(heading):
    """The rows of the table below a heading, as lists of cells without backticks; a bar in a cell is escaped."""
    lines = [line for line in below(heading).splitlines() if line.startswith("|")]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return [[cell.strip().replace("`", "").replace("\\|", "|") for cell in row] for row in rows[2:]]


def labels_of_the_code():
    """What is hashed, expanded or signed under: labels of `derive` and `mixed`, byte strings that end with a bar."""
    found = set()
    for path in (path for path in SOURCE.rglob("*.py") if "testing" not in path.parts):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if called in ("derive", "mixed"):
                argument = node.args[-1]
                if isinstance(argument, ast.Constant):
                    found.add(argument.value)
                elif isinstance(argument, ast.JoinedStr):
                    found.add(_pattern(argument))
                else:
                    name = ast.unparse(argument)
                    assert name in ("self._raw", "shared", "label"), f"{path.name}: derive({name})"
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "label":
                found.add(_pattern(node.value))
            if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
                text = node.value.decode(errors="replace")
                if text.endswith("|") or text in ("upload", "fedrp/"):
                    found.add(text)
    return found


def _pattern(joined):
    return "".join(part.value if isinstance(part, ast.Constant) else "*" for part in joined.values)


def test_the_labels_of_the_page_are_those_of_the_code():
    """All that is in code marks there is a label."""
    listed = [re.sub(r"<[^>]*>", "*", label) for label in re.findall(r"`([^`]+)`", below("Labels"))]
    assert len(set(listed)) == len(listed)
    assert set(listed) == labels_of_the_code()


def test_the_kinds_of_the_page_are_those_of_the_code():
    assert [(int(row[0]), row[1]) for row in table("Kinds")] == [(kind.value, kind.name) for kind in Kind]
    assert f"Wire version {wire.VERSION}" in PAGE
    assert f"header of {wire.HEADER_BYTES} bytes" in PAGE


def test_every_kind_has_a_rule():
    told = below("Client rules") + below("Server rules")
    for kind in Kind:
        assert re.search(rf"\b{kind.name}\b", told), kind.name


LIMITS = [("fedrp-subspace", "history"), ("fedavg", "aggregate"), ("fedrp", "own")]
ENVELOPES = {"x25519": 144, "hybrid": 1232}


@pytest.mark.parametrize(("name", "memory"), LIMITS)
@pytest.mark.parametrize("sealing", ["x25519", "hybrid"])
def test_the_limits_of_the_page_are_those_of_the_code(name, memory, sealing):
    """Their formulas, computed for odd numbers that no other formula gives."""
    assert ALGORITHMS[name].server.memory == memory
    config = Resolved.of(RunConfig(algorithm=name, clients=7, rounds=13, sealing=sealing, lr=0.1))
    names = {"K": 7, "T": 13, "u": 101, "R": 13 if memory == "history" else 1, "e": ENVELOPES[sealing]}
    for side, limit in (("client", limits.from_server(config, 101)), ("server", limits.from_client(config, 101))):
        rows = [row for row in table("Kinds") if row[2] == side]
        told = {Kind[row[1]]: (computed(row[3], names), computed(row[4], names)) for row in rows}
        assert told == {kind: tuple(entry) for kind, entry in limit.items()}


def computed(formula, names):
    """The value of sums of products, as `100 K` or `R + 2`."""
    total = 0
    for term in formula.split("+"):
        product = 1
        for factor in term.split():
            product *= names.get(factor) or int(factor)
        total += product
    return total


def test_lines_of_the_page_are_short():
    assert not [line for line in PAGE.splitlines() if len(line) > 100]
