"""docs/protocol.md once more, in plain Python: hashlib, hmac, struct, zlib, and the bare primitives of `cryptography`.

Nothing here imports the package, so that vectors made here check the specification and not the code with itself.
"""

import hashlib
import hmac
import json
import math
import struct
import zlib
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from oracles import projection

SIGNATURE = 64


# --- section 4: keys --------------------------------------------------------------------------------------------------


def extract(salt, secret):
    return hmac.digest(salt or bytes(32), secret, "sha256")


def expand(key, info, length=32):
    blocks = [b""]
    for number in range(1, -(-length // 32) + 1):
        blocks.append(hmac.digest(key, blocks[-1] + info + bytes([number]), "sha256"))
    return b"".join(blocks)[:length]


class Key(NamedTuple):
    """32 secret bytes, as oracles/projection.py takes them."""

    raw: bytes

    def derive(self, label):
        return Key(expand(self.raw, b"fedrp/" + label.encode()))

    def keystream(self, count, offset=0):
        counter = (offset // 16).to_bytes(16, "big")
        cipher = Cipher(algorithms.AES256(self.raw), modes.CTR(counter)).encryptor()
        return np.frombuffer(cipher.update(bytes(count)), np.uint8)


def derived(raw, label):
    return Key(raw).derive(label).raw


class Secrets(NamedTuple):
    """The private keys of an identity."""

    ed25519: Ed25519PrivateKey
    x25519: X25519PrivateKey
    ml_kem: MLKEM768PrivateKey
    hybrid_x25519: X25519PrivateKey
    noise: bytes


def identity(secret):
    def x25519(label):
        return X25519PrivateKey.from_private_bytes(hashlib.sha512(derived(secret, label)).digest()[:32])

    return Secrets(
        Ed25519PrivateKey.from_private_bytes(derived(secret, "identity/ed25519")),
        x25519("identity/x25519"),
        MLKEM768PrivateKey.from_seed_bytes(
            derived(secret, "identity/ml-kem-768/d") + derived(secret, "identity/ml-kem-768/z")
        ),
        x25519("identity/hybrid-x25519"),
        derived(secret, "identity/noise"),
    )


def public(private):
    return private.public_key().public_bytes_raw()


def public_keys(secret):
    keys = identity(secret)
    hybrid = public(keys.ml_kem) + public(keys.hybrid_x25519)
    return {"x25519": public(keys.x25519), "ed25519": public(keys.ed25519), "hybrid": hybrid}


def entry_digest(name, keys):
    parts = [name.encode(), keys["x25519"], keys["ed25519"], keys["hybrid"]]
    return hashlib.sha256(b"fedrp silo v1|" + b"".join(struct.pack("<I", len(p)) + p for p in parts)).digest()


def proof(secret, entry):
    seeds = ("identity/ed25519", "identity/x25519", "identity/hybrid-x25519")
    signers = [Ed25519PrivateKey.from_private_bytes(derived(secret, seed)) for seed in seeds]
    return b"".join(signer.sign(b"fedrp proof of possession v1|" + entry) for signer in signers)


def roster_digest(entries):
    return hashlib.sha256(b"fedrp roster v1|" + b"".join(entries)).digest()


# --- section 5: envelopes ---------------------------------------------------------------------------------------------


def place(run, round_, dealer, recipient, tag, roster, sealing):
    return b"fedrp epoch secret v1|" + struct.pack("<16sIIIH32s", run, round_, dealer, recipient, tag, roster) + sealing


def seal(key, dealer, recipient, ephemeral, where):
    """An `x25519` envelope with a given ephemeral key, which a real dealer draws."""
    peer = X25519PublicKey.from_public_bytes(recipient)
    enc = public(ephemeral)
    shared = dhkem_secret(ephemeral.exchange(peer), enc, recipient)
    aead, nonce = key_schedule(0x0020, shared, where)
    sealed = enc + aead.encrypt(nonce, key, b"")
    return sealed + dealer.sign(where + sealed)


def opened(envelope, dealer, keys, where):
    """The secret in an envelope; raises if signature or seal is wrong."""
    sealed, signature = envelope[:-SIGNATURE], envelope[-SIGNATURE:]
    Ed25519PublicKey.from_public_bytes(dealer).verify(signature, where + sealed)
    if where.endswith(b"x25519"):
        enc, kem = sealed[:32], 0x0020
        exchanged = keys.x25519.exchange(X25519PublicKey.from_public_bytes(enc))
        shared = dhkem_secret(exchanged, enc, public(keys.x25519))
    else:
        enc, kem = sealed[: 1088 + 32], 0x647A
        first = keys.ml_kem.decapsulate(enc[:1088])
        second = keys.hybrid_x25519.exchange(X25519PublicKey.from_public_bytes(enc[1088:]))
        mixed = first + second + enc[1088:] + public(keys.hybrid_x25519)
        shared = hashlib.sha3_256(mixed + bytes.fromhex("5c2e2f2f5e5c")).digest()
    aead, nonce = key_schedule(kem, shared, where)
    return aead.decrypt(nonce, sealed[len(enc) :], b"")


def round_key(secrets, round_):
    """The key of a round, from the secrets that were dealt, by the first round of their epoch."""
    first = max(dealt for dealt in secrets if dealt <= round_)
    epoch = secrets[0]
    if first:
        epoch = expand(extract(derived(secrets[0], "epochs"), secrets[first]), b"fedrp/epoch/" + str(first).encode())
    return derived(epoch, f"round-key/{round_}")


def dhkem_secret(exchanged, enc, recipient):
    """RFC 9180, section 4.1."""
    suite = b"KEM" + struct.pack(">H", 0x0020)
    key = extract(b"", b"HPKE-v1" + suite + b"eae_prk" + exchanged)
    return labelled(suite, key, b"shared_secret", enc + recipient, 32)


def key_schedule(kem, shared, info):
    """RFC 9180, section 5.1: base mode, HKDF-SHA256 (1), ChaCha20-Poly1305 (3); the first nonce is the base nonce."""
    suite = b"HPKE" + struct.pack(">HHH", kem, 1, 3)
    no_psk = extract(b"", b"HPKE-v1" + suite + b"psk_id_hash")
    context = b"\0" + no_psk + extract(b"", b"HPKE-v1" + suite + b"info_hash" + info)
    secret = extract(shared, b"HPKE-v1" + suite + b"secret")
    key, nonce = (labelled(suite, secret, what, context, size) for what, size in ((b"key", 32), (b"base_nonce", 12)))
    return ChaCha20Poly1305(key), nonce


def labelled(suite, key, label, info, length):
    return expand(key, struct.pack(">H", length) + b"HPKE-v1" + suite + label + info, length)


# --- section 6: masks -------------------------------------------------------------------------------------------------


def mask_private(secret):
    return X25519PrivateKey.from_private_bytes(derived(secret, "mask-key"))


def signed_mask_key(secret, signer, run, roster, client):
    key = public(mask_private(secret))
    return key + signer.sign(b"fedrp mask key v1|" + struct.pack("<16s32sI", run, roster, client) + key)


def settings_digest(settings):
    told = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in settings.items()}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"fedrp settings v1|" + text.encode()).digest()


def transcript(before, applied_in, past, aggregate, round_key):
    mark = derived(round_key, "transcript") if round_key else bytes(32)
    told = bytes(32) if aggregate is None else hashlib.sha256(floats(aggregate)).digest()
    step = struct.pack("<II", applied_in, past) + told + mark
    return hashlib.sha256(b"fedrp transcript v1|" + struct.pack("<I", len(before)) + before + step).digest()


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def whole_numbers(values):
    return struct.pack(f"<{len(values)}I", *values)


class Scene(NamedTuple):
    """What two clients must have in common for their masks to cancel."""

    run: bytes
    round: int
    roster: bytes
    clients: list
    weights: list
    transcript: bytes
    round_key: bytes | None


def mask(scene, one, other, size, purpose):
    """The mask between two clients, each as (number, private key, public key); the other's private key is not used."""
    ends = sorted([(one[0], one[2]), (other[0], other[2])])
    place = hashlib.sha256(
        struct.pack("<16sI32s", scene.run, scene.round, scene.roster)
        + b"".join(struct.pack("<I", client) + key for client, key in ends)
        + hashlib.sha256(whole_numbers(scene.clients + scene.weights)).digest()
        + hashlib.sha256(scene.transcript).digest()
        + purpose
    ).digest()
    shared = one[1].exchange(X25519PublicKey.from_public_bytes(other[2]))
    salt = derived(scene.round_key, "masks") if scene.round_key else b""
    key = expand(extract(salt, shared), b"fedrp shared key v2|mask|" + place)
    return struct.unpack(f"<{size}I", Key(key).keystream(4 * size).tobytes())


def added(words, scene, one, others, purpose):
    for other in others:
        if other[0] != one[0]:
            sign, pad = 1 if one[0] < other[0] else -1, mask(scene, one, other, len(words), purpose)
            words = [(word + sign * number) % 2**32 for word, number in zip(words, pad, strict=True)]
    return words


def correction(scene, one, everyone, left_out, size):
    summed = [other for other in everyone if other[0] not in left_out]
    words = added([0] * size, scene, one, [everyone[number] for number in left_out], b"upload")
    return added(words, scene, one, summed, b"recovery|" + whole_numbers(left_out))


def fixed_point(values, bound, step, weight):
    """Steps modulo 2^32; Python rounds halves to even, as the specification does."""
    return [round(max(-bound, min(bound, value)) * (weight / step)) % 2**32 for value in values]


def mean(total, step, divisor):
    signed = [word - 2**32 if word >= 2**31 else word for word in total]
    return [float(np.float32(number * step / divisor)) for number in signed]


def spread(x, place):
    """Section 3, by matrices: no fast transform, in binary64."""
    seed = int.from_bytes(hashlib.sha256(b"fedrp public randomness v1|" + place).digest()[:16], "little")
    words = iter(np.random.Philox(key=seed).random_raw(4 * -(-len(x) // 64) + 4).tolist())
    size = 2 ** int(math.log2(len(x)))
    hadamard = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / math.sqrt(size)
    x = np.array(x, np.float64)
    for _ in range(2):
        x = np.concatenate([x[len(x) - len(x) // 2 :], x[: len(x) - len(x) // 2]])
        for block in (slice(start, start + size) for start in sorted({0, len(x) - size})):
            bits = "".join(f"{next(words):064b}"[::-1] for _ in range(-(-size // 64)))[:size]
            x[block] = hadamard @ (x[block] * [1 - 2 * int(bit) for bit in bits])
    return x


def centroids(bits):
    """Lloyd's iteration for a standard normal, with quantiles as the start."""
    normal, count = NormalDist(), 2**bits
    found = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    for _ in range(4000):
        edges = [-40.0, *((a + b) / 2 for a, b in pairwise(found)), 40.0]
        found = [(normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a)) for a, b in pairwise(edges)]
    return [round(number * 2**20) / 2**20 for number in found]


def window_values(window, bits):
    seed = int.from_bytes(hashlib.sha256(b"fedrp public randomness v1|trellis").digest()[:16], "little")
    states, ways = 2**window, 2**bits
    words = np.random.Philox(key=seed).random_raw(2 * states // ways).tolist()
    order, turns = words[: states // ways], words[states // ways :]
    deviation = math.sqrt(1 - 4.0**-bits) if window >= 4 * bits else 1.2
    quantiles = [NormalDist().inv_cdf((i + 0.5) / states) * deviation for i in range(states)]
    ranks = sorted(range(states // ways), key=lambda place: order[place])
    values = []
    for rank, turn in zip(ranks, turns, strict=True):
        values += [quantiles[rank + (code + turn) % ways * (states // ways)] for code in range(ways)]
    return [round(value * 2**20) / 2**20 for value in values]


def decoded(payload, size, bits, window, place):
    """The vector of a payload of few bits; by centroids where there is no window."""
    scale = struct.unpack("<f", payload[:4])[0]
    stream = "".join(f"{byte:08b}"[::-1] for byte in payload[4:])
    codes = [int(stream[i * bits : (i + 1) * bits][::-1], 2) for i in range(size)]
    values, last, there = window_values(window, bits) if window else centroids(bits), 0, []
    for code in codes:
        last = (last << bits | code) % 2**window if window else code
        there.append(scale * values[last])
    forth = np.array([spread(row, place) for row in np.eye(size)])  # row i: where unit vector i goes
    return (forth @ there).tolist()


def levels(x, norm, most, steps, clients, noise_key):
    """Words of few bits without noise, with the two whole ones; `norm` is the common one, or None."""
    own = min(most, math.sqrt(sum(number * number for number in x)))
    bound = (2 + math.log2(steps) / 3) * (own if norm is None else norm) / math.sqrt(len(x))
    coins = Key(derived(noise_key, "rounding")).keystream(4 * len(x)).view("<u4").tolist()
    scaled = [max(-bound, min(bound, number)) / bound for number in spread(x, b"masked").tolist()]
    made = [math.floor((y + 1) * steps / 2 + coin * 2.0**-32) for y, coin in zip(scaled, coins, strict=True)]
    return [*made, fixed_point([own], most, most * clients / (2**31 - 1 - clients), 1)[0], sum(made) % 2**32]


def packed(words, width, whole):
    bits = "".join(f"{word % 2**width:0{width}b}"[::-1] for word in words[: len(words) - whole])
    data = bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))
    return data + whole_numbers(words[len(words) - whole :])


# --- section 7: the model and its mark --------------------------------------------------------------------------------


def initial_model(key, template, laws):
    """`laws` are (size, mean, spread) per tensor, in order."""
    words = Key(derived(key, "initial-model")).keystream(8 * len(template)).view("<u8")
    result, start = [], 0
    for size, centre, spread in laws:
        for place in range(start, start + size):
            uniform = min((float(int(words[place]) >> 11) + 0.5) * 2.0**-53, 1 - 2.0**-53)
            normal = np.float32(NormalDist().inv_cdf(uniform))
            drawn = np.float32(centre) + np.float32(spread) * normal
            result.append(float(drawn) if spread > 0 else template[place])
        start += size
    return result


def law(first, second):
    """Mean and spread of a tensor from its values under two seeds; the second build gives only its first number."""
    if first == second:
        return 0.0, 0.0
    values = np.array([*first, second[0]] if len(first) == 1 else first)
    return float(np.float32(values.mean())), float(np.float32(values.std()))


def model_mark(key, family, model):
    secret = Key(key).derive("fingerprint")
    if family == "gaussian":
        sketch = projection.matrix("sign", secret, len(model), min(4, len(model))) @ np.array(model)
        shifts = secret.derive("shift").keystream(4 * len(sketch)).view("<u4") / 2**32
        grid = [int(np.floor(float(np.float32(s)) * 128 + shift)) for s, shift in zip(sketch, shifts, strict=True)]
        data = struct.pack(f"<{len(grid)}q", *grid)
    else:
        data = floats(model)
    return hmac.digest(secret.derive("mac").raw, data, "sha256")[:4]


# --- section 8: noise -------------------------------------------------------------------------------------------------


def noise_key(secret, run, round_, packet):
    label = f"noise/{run.hex()}/{round_}/{hashlib.sha256(packet).hexdigest()}"
    return derived(identity(secret).noise, label)


def normals(key, count):
    values = []
    for word in Key(key).keystream(8 * count).view("<u8"):
        tail = NormalDist().inv_cdf((float(int(word) >> 1) + 0.5) * 2.0**-64)
        values.append(tail if int(word) & 1 else -tail)
    return values


def noise_law(settings, participants):
    """The deviations of a client's noise, on update and vote, and the step of its grid; in the units of its numbers."""
    clip, clients = settings["clip"], settings["clients"]

    def shares(count):
        multipliers = [settings["noise_multiplier"]]
        if settings["clip_quantile"] is not None:
            votes = clients / 20
            multipliers = [multipliers[0] / math.sqrt(1 - (multipliers[0] / (2 * votes)) ** 2), votes]
        if settings["dp_noise"] == "local":
            return multipliers
        least = math.ceil(count * settings["quorum"])
        return [multiplier / math.sqrt(least - min(1, least - 1)) for multiplier in multipliers]

    exponent = math.floor(math.log2(clip * min(shares(clients)))) - 12
    if settings["secure_aggregation"]:
        finest = (1 + 16 * max(shares(clients))) * clients / (2**31 - 1 - clients)
        exponent = max(exponent, math.ceil(math.log2(clip * finest)))
    return [clip * share for share in shares(participants)], 2.0**exponent


def private_upload(settings, participants, update, key):
    (deviation, *vote), step = noise_law(settings, participants)
    sent = noised(update, deviation, step, derived(key, "update"))
    if vote:  # the update is shorter than the clip in these vectors
        sent += noised([settings["clip"] / 2], vote[0], step, derived(key, "vote"))
    return sent


def noised(values, deviation, step, key):
    drawn = normals(key, len(values))
    return [round((value + deviation * normal) / step) * step for value, normal in zip(values, drawn, strict=True)]


# --- section 3: messages ----------------------------------------------------------------------------------------------


def context(run, tag):
    return hashlib.sha256(b"fedrp context v1|" + run + struct.pack("<H", tag)).digest()[:4]


def message(kind, where, round_, sender, items, dtype=0, weight=0, fingerprint=bytes(4)):
    """`where` is the context."""
    body = {0: bytes, 1: floats, 2: whole_numbers}[dtype](items)
    header = bytes([0xF7, kind, dtype]) + where + struct.pack("<H", round_) + sender.to_bytes(3, "little")
    header += struct.pack("<II", weight, len(items)) + fingerprint
    return header + struct.pack("<I", zlib.crc32(header + body)) + body
