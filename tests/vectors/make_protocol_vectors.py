"""Make protocol.json: known answers for docs/protocol.md, by the oracle in tests/support/oracles, not by the package.

Run it again only when the protocol changes:  python tests/vectors/make_protocol_vectors.py

Bytes are hexadecimal, floating-point numbers are hexadecimal floats, all of them exact. Names of sections are those of
the specification. Everything repeats but the `hybrid` envelope, whose encapsulation draws randomness that cannot be
given: it was made once and is kept, as long as it opens.
"""

import json
import struct
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, MLKEM768X25519PublicKey, Suite

HERE = Path(__file__).parent
FILE = HERE / "protocol.json"
sys.path.insert(0, str(HERE.parent / "support"))

from oracles import protocol as oracle  # noqa: E402

RUN = bytes(range(16))
NAMES = ["north", "south", "east", "west"]
SECRETS = [sha256(f"identity of {name}".encode()).digest() for name in NAMES]
MASK_SECRETS = [sha256(f"mask secret of {name}".encode()).digest() for name in NAMES]
EPOCHS = {first: sha256(f"secret dealt for round {first}".encode()).digest() for first in (0, 3)}
ROUND_KEYS = [oracle.round_key(EPOCHS, round_) for round_ in range(5)]
SIGN = 2 << 8 | 1  # the projection `sign`, version 1
GAUSSIAN = 1 << 8 | 1
AGGREGATES = [[0.5, -1.25, 3.0, 0.0], [0.0, 1e-3, -7.5, 2.0**-20], [1.0, 1.0, 1.0, 1.0]]
SERVER = 2**24 - 1
FLOATS = ("clip", "noise_multiplier", "clip_quantile", "quorum")  # among the settings below


def shown(value):
    """A value as JSON has it here."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        return {name: shown(item) for name, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list | tuple) else value


def identities():
    cases = []
    for name, secret in zip(NAMES, SECRETS, strict=True):
        keys = oracle.public_keys(secret)
        digest = oracle.entry_digest(name, keys)
        hybrid = {"hybrid_sha256": sha256(keys["hybrid"]).digest()}
        shared = {"name": name, "secret": secret, "x25519": keys["x25519"], "ed25519": keys["ed25519"], **hybrid}
        cases.append({**shared, "entry_digest": digest, "proof": oracle.proof(secret, digest)})
    return cases


ROSTER = oracle.roster_digest([case["entry_digest"] for case in identities()])


def envelopes():
    """Dealer 1 to client 2, round 3."""
    dealer, recipient = oracle.identity(SECRETS[1]), oracle.identity(SECRETS[2])
    cases = []
    for sealing in ("x25519", "hybrid"):
        where = oracle.place(RUN, 3, 1, 2, SIGN, ROSTER, sealing.encode())
        case = {"sealing": sealing, "run": RUN, "round": 3, "dealer": 1, "recipient": 2, "projection": SIGN}
        case |= {"roster": ROSTER, "place": where, "secret": EPOCHS[3]}
        if sealing == "x25519":
            ephemeral = X25519PrivateKey.from_private_bytes(sha256(b"ephemeral").digest())
            made = oracle.seal(EPOCHS[3], dealer.ed25519, oracle.public(recipient.x25519), ephemeral, where)
        else:
            made = kept_envelope(dealer, recipient, where)
        if oracle.opened(made, oracle.public(dealer.ed25519), recipient, where) != EPOCHS[3]:
            raise SystemExit(f"the {sealing} envelope does not hold the secret")
        cases.append({**case, "envelope": made})
    return cases


def kept_envelope(dealer, recipient, where):
    """The hybrid envelope of the file, or a new one if that does not open."""
    if FILE.exists():
        made = bytes.fromhex(json.loads(FILE.read_text())["envelopes"][1]["envelope"])
        try:
            oracle.opened(made, oracle.public(dealer.ed25519), recipient, where)
        except (InvalidSignature, InvalidTag):
            pass
        else:
            return made
    keys = oracle.public_keys(SECRETS[2])["hybrid"]
    lattice = MLKEM768PublicKey.from_public_bytes(keys[:1184])
    target = MLKEM768X25519PublicKey(lattice, X25519PublicKey.from_public_bytes(keys[1184:]))
    suite = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
    sealed = suite.encrypt(EPOCHS[3], target, where)
    return sealed + dealer.ed25519.sign(where + sealed)


def round_keys():
    """Epochs that begin with the set-up and with round 3."""
    secrets = [{"first": first, "secret": secret} for first, secret in EPOCHS.items()]
    return [{"secrets": secrets, "round_keys": ROUND_KEYS}]


def mask_keys():
    cases = []
    for client, (secret, mask_secret) in enumerate(zip(SECRETS, MASK_SECRETS, strict=True)):
        signer = oracle.identity(secret).ed25519
        signed = oracle.signed_mask_key(mask_secret, signer, RUN, ROSTER, client)
        cases.append({"client": client, "identity": secret, "mask_secret": mask_secret, "signed": signed})
    return cases


# Names and types of all settings, with values of every type; those of a run are resolved.
SETTINGS = {
    "algorithm": "fedavg-dp", "dataset": "mnist-mini", "model": "lenet5", "clients": 4, "rounds": 9, "local_epochs": 1,
    "batch_size": 64, "lr": 0.1, "lr_rule": None, "lr_schedule": "constant", "momentum": 0.9, "grad_clip": 1.0,
    "augment": "none", "rho": None, "dim": 1000,
    "projection": None,
    "rotation": None, "bits": 32.0, "bits_down": 32.0, "bytes": None,
    "relabel": False,
    "train_examples": None, "partition": "iid", "participation": 1.0, "sampling": "fixed", "dropout": 0.0,
    "quorum": 1.0, "weighting": "uniform", "aggregation": "mean", "server_momentum": 0.0, "deliver": None,
    "proximal": 0.0,
    "seed": 2**62, "clip": 0.3, "noise_multiplier": 1.2345678901,
    "dp_unit": "client", "record_epsilon": None, "record_clip": None, "dp_epsilon": None, "dp_delta": 1e-05,
    "dp_noise": "shared",
    "clip_quantile": None, "ball": None, "sensitivity": None, "norm_floor": None, "secure_aggregation": True,
    "secure_range": 64.0, "key_epoch": 64, "sealing": "x25519",
}  # fmt: skip


def settings():
    return [{"settings": json.dumps(SETTINGS), "digest": oracle.settings_digest(SETTINGS)}]


def transcripts():
    """Chains of steps (applied_in, past, aggregate or null, round key or null), each with its digest."""
    first, second, third = AGGREGATES
    chains = {
        "aggregate": [(0, 2, second, None)],
        "history": [(0, 0, None, ROUND_KEYS[0]), (0, 1, first, ROUND_KEYS[1]), (0, 3, third, ROUND_KEYS[3])],
        "own, without round keys": [(1, 0, None, None), (2, 1, first, None)],
        "own, with round keys": [(1, 0, None, ROUND_KEYS[0]), (2, 1, first, ROUND_KEYS[1])],
    }
    cases = []
    for memory, chain in chains.items():
        before, steps = oracle.settings_digest(SETTINGS), []
        for applied_in, past, aggregate, key in chain:
            before = oracle.transcript(before, applied_in, past, aggregate, key)
            step = {"applied_in": applied_in, "past": past, "aggregate": aggregate, "round_key": key}
            steps.append({**step, "digest": before})
        cases.append({"memory": memory, "settings": oracle.settings_digest(SETTINGS), "steps": steps})
    return cases


def masks():
    """Four clients of unequal weights; with all uploads, and with clients 1 and 2 left out."""
    everyone = [
        (client, oracle.mask_private(secret), oracle.public(oracle.mask_private(secret)))
        for client, secret in enumerate(MASK_SECRETS)
    ]
    weights, bound, left_out = [3, 1, 4, 2], 64.0, [1, 2]
    vectors = [[0.25, -64.0, 100.0, 1e-7, -0.1], [1.5, 2.5, -3.5, 0.0, 7.0], [-1.0] * 5, [63.9, 0.5, -0.5, 1 / 3, 8.0]]
    step = 16 * bound * sum(weights) / (2**31 - 1 - len(weights))
    cases = []
    for key in (None, ROUND_KEYS[3]):
        digest = oracle.transcript(
            oracle.settings_digest(SETTINGS), 0, 2, AGGREGATES[1], ROUND_KEYS[2] if key else None
        )
        scene = oracle.Scene(RUN, 3, ROSTER, [0, 1, 2, 3], weights, digest, key)
        encoded = [oracle.fixed_point(v, bound, step, w) for v, w in zip(vectors, weights, strict=True)]
        uploads = [
            oracle.added(words, scene, one, everyone, b"upload") for words, one in zip(encoded, everyone, strict=True)
        ]
        rest = [one for one in everyone if one[0] not in left_out]
        corrections = {str(one[0]): oracle.correction(scene, one, everyone, left_out, 5) for one in rest}
        total = [sum(column) % 2**32 for column in zip(*uploads, strict=True)]
        kept = [uploads[one[0]] for one in rest]
        summed = [
            (sum(words) - sum(taken)) % 2**32
            for words, taken in zip(zip(*kept, strict=True), zip(*corrections.values(), strict=True), strict=True)
        ]
        if total != [sum(column) % 2**32 for column in zip(*encoded, strict=True)]:
            raise SystemExit("the masks do not cancel")
        if summed != [(a + b) % 2**32 for a, b in zip(encoded[0], encoded[3], strict=True)]:
            raise SystemExit("the corrections do not take the masks off")
        cases.append(
            {
                "run": RUN, "round": 3, "roster": ROSTER, "clients": scene.clients, "weights": weights,
                "transcript": digest, "round_key": key, "mask_secrets": MASK_SECRETS, "vectors": vectors,
                "bound": bound, "step": step, "encoded": encoded,
                "mask_of_0_and_1": list(oracle.mask(scene, everyone[0], everyone[1], 5, b"upload")),
                "uploads": uploads, "mean": oracle.mean(total, step, sum(weights)),
                "left_out": left_out, "corrections": corrections, "mean_of_the_rest": oracle.mean(summed, step, 5),
            }
        )  # fmt: skip
    return cases


def final_means():
    """Round T + 1 of a run of two rounds, unmasked or masked, whose clients' models are averaged then."""
    everyone = [
        (client, oracle.mask_private(secret), oracle.public(oracle.mask_private(secret)))
        for client, secret in enumerate(MASK_SECRETS)
    ]
    bound, last, context = 64.0, 3, oracle.context(RUN, GAUSSIAN)
    models = [[0.5, -0.25, 65.0, 1e-3, -2.0], [0.25, 0.75, -1.0, 0.0, 2.5], [-1.5] * 5, [3.0, 1 / 3, -0.5, 1e-7, 0.125]]
    models = [[float(np.float32(number)) for number in model] for model in models]
    step = 16 * bound * 4 / (2**31 - 1 - 4)
    cases = []
    for masked in (False, True):
        # With fewer rounds and weights that the exchange does not have.
        told = {**SETTINGS, "algorithm": "fedrp", "rounds": 2, "dim": 4, "projection": "gaussian", "rho": 0.1}
        told |= {"deliver": "average", "secure_aggregation": masked, "weighting": "uniform" if masked else "samples"}
        told |= {"clip": None, "noise_multiplier": None, "key_epoch": 1}
        if masked:  # own: all rounds
            chain = [(t, t - 1, AGGREGATES[t - 2] if t > 1 else None, ROUND_KEYS[t - 1]) for t in (1, 2, 3)]
        else:  # aggregate: the latest one
            chain = [(0, 2, AGGREGATES[1], ROUND_KEYS[2])]
        digest = oracle.settings_digest(told)
        for applied_in, past, aggregate, key in chain:
            digest = oracle.transcript(digest, applied_in, past, aggregate, key)
        scene = oracle.Scene(RUN, last, ROSTER, [0, 1, 2, 3], [1, 1, 1, 1], digest, ROUND_KEYS[last])
        encoded = [oracle.fixed_point(model, bound, step, 1) for model in models]
        words = [oracle.added(own, scene, one, everyone, b"upload") for own, one in zip(encoded, everyone, strict=True)]
        mean = oracle.mean([sum(column) % 2**32 for column in zip(*words, strict=True)], step, 4)
        mark = digest[:4] if masked else bytes(4)
        uploads = [oracle.message(6, context, last, c, own, 2, 1, mark) for c, own in enumerate(words)]
        cases.append(
            {
                "settings": json.dumps(told), "run": RUN, "roster": ROSTER, "mask_secrets": MASK_SECRETS,
                "memory": "own" if masked else "aggregate",
                "steps": [
                    {"applied_in": applied_in, "past": past, "aggregate": aggregate, "round_key": key}
                    for applied_in, past, aggregate, key in chain
                ],
                "transcript": digest, "round": last, "round_key": ROUND_KEYS[last], "context": context,
                "asked": oracle.message(8, context, last, SERVER, [0, 1, 2, 3, 1, 1, 1, 1], 2, 4, bytes(4)),
                "models": models, "encoded": encoded, "uploads": uploads,
                "mean": mean, "aggregate": oracle.message(7, context, last, SERVER, mean, 1, 0, bytes(4)),
                "finish": oracle.message(9, context, last, SERVER, b"", 0, 0, bytes(4)),
            }
        )  # fmt: skip
    return cases


def levels():
    """Three clients of a run with up to five; before there is a common norm, and after. Few and many bits; m = 6, 8."""
    cases, most = [], 64.0
    for bits, size, norm in ((1, 6, None), (1, 8, 1.75), (4, 6, 1.75)):
        vectors = [[((37 * i + 11 * c * c + 5) % 23 - 11) / 16 for i in range(size)] for c in range(3)]
        width = bits + 3
        steps = (2**width - 1) // 3
        words = [oracle.levels(v, norm, most, steps, 3, MASK_SECRETS[c]) for c, v in enumerate(vectors)]
        cases.append(
            {
                "bits": bits, "most_clients": 5, "secure_range": most, "norm": norm, "noise_keys": MASK_SECRETS[:3],
                "vectors": vectors, "width": width, "words": words, "payload": oracle.packed(words[0], width, 2),
            }
        )  # fmt: skip
    return cases


def few_bits():
    """Payloads that no coder made: a receiver decodes what comes. By centroids, and by windows of 8 and 12 bits."""
    cases = []
    sizes = ((6, 1, 0), (40, 3, 0), (128, 1, 8), (130, 4, 8), (128, 1, 12), (136, 2, 12))
    for size, bits, window in sizes:
        stream = b"".join(sha256(f"few bits {i}".encode()).digest() for i in range(4))
        payload = struct.pack("<f", 0.375) + stream[: size * bits // 8 + bool(size * bits % 8)]
        payload = payload[:-1] + bytes([payload[-1] % 2 ** (size * bits % 8 or 8)])
        place = RUN + struct.pack("<II", 3, SERVER if window == 12 else 2)
        vector = oracle.decoded(payload, size, bits, window, place)
        cases.append(
            {"size": size, "bits": bits, "window": window, "place": place, "payload": payload, "vector": vector}
        )
    return cases


def model_marks():
    model = [(7919 * i % 1009) / 512 - 1 for i in range(50)]
    families = ("gaussian", "sign", "hadamard")
    marks = {family: oracle.model_mark(ROUND_KEYS[3], family, model) for family in families}
    return [{"family": f, "round_key": ROUND_KEYS[3], "model": model, "mark": mark} for f, mark in marks.items()]


def initial_models():
    """Three tensors: drawn at random, given, and a single number; under two seeds of the template."""
    first = [[0.5, -0.25, 0.125, 1.0, -0.75], [0.0, 0.0], [0.3125]]
    second = [[0.1, 0.2, -0.3, 0.4, -0.5], [0.0, 0.0], [-0.6875]]
    laws = [[len(one), *oracle.law(one, two)] for one, two in zip(first, second, strict=True)]
    model = oracle.initial_model(ROUND_KEYS[0], [number for tensor in first for number in tensor], laws)
    return [{"round_key": ROUND_KEYS[0], "first": first, "second": second, "laws": laws, "model": model}]


def noise():
    packet = b"the bytes of a packet"
    key = oracle.noise_key(SECRETS[0], RUN, 3, packet)
    update = [0.015625, -0.03125, 0.0, 0.0078125]
    base = {"clients": 4, "clip": 0.3, "noise_multiplier": 0.2, "clip_quantile": None, "dp_noise": "shared"}
    base |= {"quorum": 1.0, "secure_aggregation": True}
    settings = [base, {**base, "dp_noise": "local"}, {**base, "quorum": 0.75}, {**base, "clip_quantile": 0.5}]
    uploads = []
    for case in settings:
        deviations, step = oracle.noise_law(case, 4)
        sent = oracle.private_upload(case, 4, update, key)
        uploads.append({"settings": case, "participants": 4, "deviations": deviations, "step": step, "sent": sent})
    fixed = {"identity": SECRETS[0], "run": RUN, "round": 3, "packet": packet, "key": key}
    return [{**fixed, "normals": oracle.normals(key, 8), "update": update, "uploads": uploads}]


def contexts():
    cases = [(RUN, 0), (RUN, SIGN), (RUN[::-1], SIGN)]
    return [{"run": run, "projection": tag, "context": oracle.context(run, tag)} for run, tag in cases]


def wire():
    """One message of each kind."""
    envelope = envelopes()[0]["envelope"]
    signed = [case["signed"] for case in mask_keys()]
    words = masks()[0]["uploads"][0]
    entries = b"".join(client.to_bytes(4, "little") + key for client, key in enumerate(signed))
    mark = model_marks()[1]["mark"]
    context = contexts()[1]["context"]
    told = {
        "HELLO": (1, 0, 2, ROSTER + signed[2], 0, 4),
        "DEAL_REQUEST": (3, 3, SERVER, b""),
        "DEAL": (4, 3, 1, 4 * envelope),
        "SEALED": (5, 3, 1, envelope),
        "UPLOAD": (6, 3, 0, words, 2, 3, mark),
        "AGGREGATE": (7, 2, SERVER, AGGREGATES[1], 1),
        "ROUND": (8, 3, SERVER, [0, 1, 2, 3, 3, 1, 4, 2], 2, 4),
        "FINISH": (9, 3, SERVER, b""),
        "REBUILD": (10, 3, SERVER, b""),
        "RECOVER": (11, 3, SERVER, [1, 2], 2),
        "CORRECTION": (12, 3, 0, masks()[0]["corrections"]["0"], 2),
        "VOID": (13, 1, SERVER, b""),
        "MASK_KEYS": (14, 3, SERVER, entries),
        "COMPLAINT": (15, 3, 2, b"", 0, 1),
    }
    cases = []
    for name, (kind, round_, sender, items, *rest) in told.items():
        dtype, weight, fingerprint = (*rest, *(0, 0, bytes(4))[len(rest) :])
        encoded = oracle.message(kind, context, round_, sender, items, dtype, weight, fingerprint)
        case = {"kind": name, "code": kind, "dtype": dtype, "context": context, "round": round_}
        case |= {"sender": sender, "weight": weight, "items": items, "fingerprint": fingerprint, "encoded": encoded}
        cases.append(case)
    return cases


def sections():
    return {
        "identities": identities(),
        "roster": [{"digest": ROSTER}],
        "envelopes": envelopes(),
        "round_keys": round_keys(),
        "mask_keys": mask_keys(),
        "settings": settings(),
        "transcripts": transcripts(),
        "masks": masks(),
        "levels": levels(),
        "few_bits": few_bits(),
        "model_marks": model_marks(),
        "initial_models": initial_models(),
        "noise": noise(),
        "final_means": final_means(),
        "contexts": contexts(),
        "wire": wire(),
    }


def text():
    """The whole file: a case per line."""
    parts = [
        f'"{name}": [\n' + ",\n".join(json.dumps(shown(case)) for case in cases) + "\n]"
        for name, cases in sections().items()
    ]
    return '{"about": "see make_protocol_vectors.py",\n' + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text())
