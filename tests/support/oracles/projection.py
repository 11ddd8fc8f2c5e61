"""The projections once more, in plain NumPy: dense float64 matrices from the definitions, and twins of the kernels."""

import numpy as np

UNIT = 128  # words of the stream that make one unit of normals: 64 for radii, 64 for angles
BLOCK = 8192  # coordinates per block of `sign` at least


def matrix(family, key, n, m, version=1):
    key = key.derive(f"projection/{family}/v{version}/{m}x{n}")
    return {"gaussian": gaussian, "sign": sign, "hadamard": mixed_sign}[family](key, n, m)


def gaussian(key, n, m):
    pitch = -(-n // UNIT) * UNIT
    words = key.keystream(4 * m * pitch).view("<u4").reshape(m, pitch)
    return np.stack([normals(row) for row in words])[:, :n] / np.sqrt(m)


def sign(key, n, m):
    rows, signs = sign_entries(key, n, m)
    dense = np.zeros((m, n))
    dense[rows, np.arange(n)] = signs
    return dense


def mixed_sign(key, n, m):
    size = 1
    while 4 * size <= min(n, 65536):
        size *= 4
    blocks = -(-n // size)
    bits = key.derive("mix").keystream(-(-blocks // 8) * size).reshape(-1, size)
    columns = sign(key.derive("sign"), n, m).T.copy()
    for block in reversed(range(blocks)):  # A' = mixing' sign'
        part = slice(min(block * size, n - size), min(block * size, n - size) + size)
        signs = 1 - 2.0 * (bits[block // 8] >> (block % 8) & 1)
        columns[part] = signs[:, None] * transform(columns[part])
    return columns.T


def sign_entries(key, n, m):
    """The row and the sign of each column's entry."""
    pieces = 1
    while pieces * m < min(n, BLOCK):
        pieces += 1
    width = pieces * m
    blocks = -(-n // width)
    block, coordinate = np.divmod(np.arange(n), width)
    bits = key.derive("signs").keystream(-(-blocks // 8) * width)
    negative = bits[block // 8 * width + coordinate] >> (block % 8) & 1
    rolls = [(int(word) * width) >> 64 for word in key.derive("rolls").keystream(8 * blocks).view("<u8")]
    rolls[-1] = 0
    piece, place = np.divmod((coordinate + np.array(rolls)[block]) % width, m)
    row_of = np.empty((pieces, m), int)
    for p, words in enumerate(key.derive("order").keystream(8 * width).view("<u8").reshape(pieces, m)):
        row_of[p, sorted(range(m), key=words.__getitem__)] = np.arange(m)
    return row_of[piece, place], 1 - 2.0 * negative


def normals(words):
    """Box-Muller in float64, one row of words."""
    units = words.astype(np.int64).reshape(-1, 2, UNIT // 2)
    a, b = units[:, 0], units[:, 1]
    radius = np.sqrt(-2 * np.log1p(-((2**40 - 0.5) - (a * 256 + (b & 255))) / 2**40))
    angle = (((b >> 8) & (2**22 - 1)) - 2**21 + 0.5) * (np.pi / 2**23)
    radius = np.where(b >> 31, -radius, radius)
    pair = np.stack([np.cos(angle), np.sin(angle)], axis=1) * radius[:, None]
    return np.where(((b >> 30) & 1)[:, None], pair[:, ::-1], pair).reshape(-1)


def normals32(words, scale):
    """`kernels.normals`, operation by operation."""
    f32 = np.float32
    units = words.reshape(-1, 2, UNIT // 2)
    a, b = units[:, 0], units[:, 1]
    low = (b & 255).astype(f32)
    u = a.astype(f32) * f32(2.0**-32) + (low * f32(2.0**-40) + f32(2.0**-41))
    rest = (~a).astype(f32) * f32(2.0**-32) + ((f32(255) - low) * f32(2.0**-40) + f32(2.0**-41))
    bits = u.view(np.int32)
    exponent = (bits - 0x3F3504F3) >> 23
    f = np.where(exponent == 0, -rest, (bits - (exponent << 23)).view(f32) - f32(1))
    e = exponent.astype(f32)
    p = np.full_like(f, 7.0376836292e-2)
    for coefficient in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1, 0,
    ):  # fmt: skip
        p = p * f + f32(coefficient)
    z = f * f
    log = (f + (p * z + e * f32(-2.12194440e-4) - f32(0.5) * z)) + e * f32(0.693359375)
    radius = np.sqrt(f32(-2) * log) * f32(scale)
    x = (((b >> 8) & 0x3FFFFF).astype(np.int32) - 2**21).astype(f32)
    x = (x + f32(0.5)) * f32(np.pi / 2**23)
    z = x * x
    sine = ((f32(-1.9515295891e-4) * z + f32(8.3321608736e-3)) * z + f32(-1.6666654611e-1)) * z * x + x
    cosine = (f32(2.443315711809948e-5) * z + f32(-1.388731625493765e-3)) * z + f32(4.166664568298827e-2)
    cosine = cosine * z * z - f32(0.5) * z + f32(1)
    radius = np.where(b >> 31, -radius, radius)
    swap = (b >> 30) & 1
    return np.stack([radius * np.where(swap, sine, cosine), radius * np.where(swap, cosine, sine)], axis=1).reshape(-1)


def fold(rows, signs, rolls, group):
    """`kernels.fold`: sums[row, group, j] in float64, blocks added in order."""
    width = signs.shape[1]
    sums = np.zeros((len(rows), -(-len(rolls) // group), width))
    for r, row in enumerate(rows):
        for block, roll in enumerate(rolls):
            part = np.zeros(width)
            values = row[block * width : (block + 1) * width]
            part[: len(values)] = values
            sums[r, block // group] += np.roll(np.where(signs[block // 8] >> (block % 8) & 1, -part, part), roll)
    return sums


def collect(sums, order):
    """`kernels.collect`: groups, then pieces; `accumulate` adds in order by definition."""
    total = np.add.accumulate(sums, axis=1)[:, -1]
    return np.add.accumulate(total[:, order], axis=1)[:, -1].astype(np.float32)


def unfold(sums, columns, signs, rolls):
    """`kernels.unfold`: the adjoint of `fold` for one group."""
    blocks = [
        np.roll(sums, -roll, axis=1) * (1 - 2 * (signs[block // 8] >> (block % 8) & 1).astype(np.float32))
        for block, roll in enumerate(rolls)
    ]
    return np.concatenate(blocks, axis=1)[:, :columns].astype(np.float32)


def transform(values):
    """The orthonormal Walsh-Hadamard transform of the first axis, one level after the other; scaled first."""
    x = values * values.dtype.type(len(values) ** -0.5)
    step = 1
    while step < len(values):
        pairs = x.reshape(-1, 2, step, *values.shape[1:])
        x = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        step *= 2
    return x.reshape(values.shape)
