"""The published experiments: what each table of docs/results.md runs. `results.py` runs, keeps and shows them."""

from collections.abc import Iterable
from typing import NamedTuple

BUDGETS = (1, 10, 50, 100, 500, 1000, 5000, 10000)
# Bytes each way; the numbers and bits that they buy, the first as --bytes chooses; a vector has a scale of 4 bytes.
BYTES = {4096: ((32736, 1), (16368, 2), (8184, 4)), 512: ((4064, 1), (2032, 2)), 128: ((992, 1),), 32: ((224, 1),)}


class Experiment(NamedTuple):
    """Runs that belong in one table."""

    title: str
    base: str  # options that all its runs share
    runs: dict[str, str]  # name of the run -> its own options
    seeds: tuple[int, ...] = (0,)


def _subspace(dims: Iterable[int], more: str = "") -> dict[str, str]:
    return {f"fedrp-subspace-{m}": f"--algorithm fedrp-subspace --projection sign --dim {m}{more}" for m in dims}


def _fedavg_rates(rates: Iterable[float]) -> dict[str, str]:
    return {"fedavg-default": "--lr 0.1", **{f"fedavg-lr{lr}": f"--lr {lr}" for lr in rates}}


# What the subspace mode uses by default with LeNet-5 and 100 clients, with m of at least n/64 and below; said aloud
# because earlier versions had other defaults.
OWN = " --lr 0.2 --server-momentum 0.5"
WITHOUT = " --lr 0.2 --server-momentum 0"
# FedAvg's learning rate before it followed the number of local steps; its default is now that of --lr 0.4 with ten
# steps a round, and of --lr 0.1 with forty and more.
DEFAULT_FEDAVG = "--algorithm fedavg --lr 0.1"
MNIST = "--dataset mnist --clients 100 --rounds 30"
PAPER_NOISE = "--algorithm fedavg-dp --clip 0.3 --lr 0.1"  # the defaults
PRIVATE = "--dataset mnist --train-examples 10000 --clients 100 --rounds 20 --local-epochs 1"
PRIVATE_FULL = PRIVATE.replace(" --train-examples 10000", "")
PRIVATE_DIMS = (100, 1000, 10000)
LENET_PARAMETERS = 61_706
# With m = n the subspace mode is FedAvg-DP, but for how the first model is drawn.
SAME_BUT_FOR_THE_START = f"fedrp-subspace-{LENET_PARAMETERS}"
PRIVATE_METHODS = {"fedavg-dp": "--algorithm fedavg-dp", **_subspace((*PRIVATE_DIMS, LENET_PARAMETERS))}
COMPARED = ("fedavg-dp", "fedrp-subspace-1000", "fedrp-subspace-10000")
EPSILONS = (10, 5)
# What seed 0 chose for each method on the grids of private-10 and private-5 (clip, lr, momentum), for FedAvg-DP also
# the best without momentum and its neighbour at the clip of the others; and the control.
PRIVATE_BEST = {
    10: (
        ("fedavg-dp", 1, 1, 0),
        ("fedavg-dp", 0.3, 0.3, 0.5),
        ("fedrp-subspace-100", 0.1, 1, 0),
        ("fedrp-subspace-1000", 0.3, 0.3, 0.5),
        ("fedrp-subspace-10000", 0.3, 0.3, 0.5),
        (SAME_BUT_FOR_THE_START, 0.3, 0.3, 0.5),
    ),
    5: (
        ("fedavg-dp", 0.1, 0.3, 0),
        ("fedavg-dp", 0.1, 0.3, 0.5),
        ("fedavg-dp", 0.3, 0.3, 0.5),
        ("fedrp-subspace-100", 0.1, 0.3, 0),
        ("fedrp-subspace-1000", 0.3, 0.3, 0.5),
        ("fedrp-subspace-10000", 0.3, 0.3, 0.5),
        (SAME_BUT_FOR_THE_START, 0.3, 0.3, 0.5),
    ),
}


# CIFAR-10 with the paper's network. Sixteen images a step: batches of 64 make four steps a round of a client's 200
# images, and learnt less in ten rounds. Chosen on images that are not in the test set: see the experiment cifar-grid.
CNN_PARAMETERS = 846_634
CIFAR = "--dataset cifar10 --model cnn --clients 50"
CIFAR_FIFTH = f"{CIFAR} --train-examples 10000"
CIFAR_HELD_OUT = (
    "--dataset npz:runs/cifar-validation.npz --model cnn --train-examples 4000 --clients 20 --local-epochs 1"
)
CIFAR_TRAINING = "--batch-size 16 --lr-schedule cosine --engine stacked:1"
CIFAR_LR = " --lr 0.05"  # also of the subspace mode: twice that learns less there
SELDOM = " --eval-every 10"  # where every client has a model of its own, scoring them all takes longer than training
# Bits a parameter each way -> numbers of one bit, in whole bytes.
CIFAR_BITS = {0.1: CNN_PARAMETERS // 10 // 32 * 32, 1: CNN_PARAMETERS}


# Patient-level privacy: every site protects its own records. 4,096 bytes: 4,092 numbers of 8 bits and a scale.
RECORDS = (
    "--rounds 30 --local-epochs 1 --dp-unit record --batch-size 256 --lr 1 --lr-schedule cosine --momentum 0.5 "
    "--server-momentum 0.5"
)
# The same where a round is one step with all records, and the noise is shared. Chosen by the test accuracy of 3,000
# images with the noise of 60,000, 30 rounds: lr 4 and 8 with momentum 0.5, 2 with 0.9.
RECORDS_SHARED = (
    "--local-epochs 1 --dp-unit record --dp-noise shared --secure-aggregation --lr 4 --server-momentum 0.5 "
    "--algorithm fedrp-subspace --dim 4092 --bits 8 --bits-down 8"
)
RECORD_METHODS = {
    "subspace": "--algorithm fedrp-subspace --dim 4092 --bits 8 --bits-down 8",
    "fedavg": "--algorithm fedavg",
}


RECORDS_HELD_OUT = (
    "--dataset npz:runs/mnist-validation.npz --clients 10 --rounds 30 --local-epochs 1 --dp-unit record --dp-epsilon 3 "
    "--momentum 0.5 --eval-every 5"
)


def _bits(size: int, bits: int) -> str:
    return f"--algorithm fedrp-subspace --dim {size} --bits {bits} --bits-down {bits}"


def _private(method: str, clip: float, lr: float, momentum: float = 0) -> str:
    # FedAvg-DP has no momentum unless it is asked for; FedRP-Subspace may.
    said = f" --server-momentum {momentum}" if momentum or method != "fedavg-dp" else ""
    return f"{PRIVATE_METHODS[method]} --clip {clip} --lr {lr}{said}"


EXPERIMENTS: dict[str, Experiment] = {
    "mnist": Experiment(
        "The paper's algorithms, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1, default settings",
        f"{MNIST} --local-epochs 1",
        {
            "fedavg": DEFAULT_FEDAVG,
            "fedadmm": "--algorithm fedadmm",
            "fwc": "--algorithm fwc",
            "fedrp-1000": "--algorithm fedrp --projection gaussian --dim 1000",
            "fedrp-10000": "--algorithm fedrp --projection sign --dim 10000",
        },
        seeds=(0, 1, 2),
    ),
    # What the paper's figures 1 and 2 show on MNIST beside the curves of other experiments here: see paper.py.
    "paper-mnist": Experiment(
        "FedAvg with the paper's noise, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1 --engine stacked:4",
        {f"fedavg-dp-{epsilon}": f"{PAPER_NOISE} --dp-epsilon {epsilon}" for epsilon in (5, 10, 40)},
    ),
    "paper-mnist-five": Experiment(
        "The paper's algorithms with five local epochs, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 5",
        f"{MNIST} --local-epochs 5 --engine stacked:4",
        {
            "fedadmm": "--algorithm fedadmm",
            "fedrp-1000": "--algorithm fedrp --projection sign --dim 1000",
            **{f"fedavg-dp-{epsilon}": f"{PAPER_NOISE} --dp-epsilon {epsilon}" for epsilon in (5, 10, 30)},
            "fwc": "--algorithm fwc",
        },
    ),
    "subspace": Experiment(
        "FedRP-Subspace against FedAvg, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1, default settings",
        f"{MNIST} --local-epochs 1",
        {"fedavg": DEFAULT_FEDAVG, **_subspace((1000,), OWN), **_subspace((100, 10, 1), WITHOUT)},
        seeds=(0, 1, 2),
    ),
    "other-momentum": Experiment(
        "Server momentum switched: off at m = 1,000, on at m = 100",
        f"{MNIST} --local-epochs 1",
        {**_subspace((1000,), WITHOUT), **_subspace((100,), OWN)},
        seeds=(0, 1, 2),
    ),
    "fedavg-grid": Experiment(
        "FedAvg's learning rate (0.1 is the default) and server momentum (none by default), full MNIST, E = 1",
        f"{MNIST} --local-epochs 1 --algorithm fedavg",
        {
            **_fedavg_rates((0.2, 0.4, 0.8)),
            **{f"fedavg-lr{lr}-momentum": f"--lr {lr} --server-momentum 0.5" for lr in (0.2, 0.4)},
        },
        seeds=(0, 1, 2),
    ),
    "few-clients": Experiment(
        "Few clients with much data: 3 clients with 3,333 images of mnist-mini each, 6 rounds, E = 1",
        "--dataset mnist-mini --clients 3 --rounds 6 --local-epochs 1",
        {
            **{f"fedavg-{lr}": f"--algorithm fedavg --lr {lr}" for lr in (0.1, 0.2, 0.4)},
            **_subspace((1000,)),
            **{
                f"subspace{option}".replace(" ", "_"): f"{_subspace((1000,))['fedrp-subspace-1000']} {option}"
                for option in ("--server-momentum 0.5", "--lr 0.1", "--lr 0.4")
            },
        },
        seeds=(0, 1, 2),
    ),
    "budget": Experiment(
        "Accuracy against what a client sends, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1",
        {
            "fedavg": DEFAULT_FEDAVG,
            **_subspace(BUDGETS[:5], WITHOUT),
            **_subspace(BUDGETS[5:], OWN),
            **{f"fedrp-{m}": f"--algorithm fedrp --projection sign --dim {m}" for m in BUDGETS},
        },
        seeds=(0, 1, 2),
    ),
    "bits": Experiment(
        "Few bits each way, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1 --engine stacked:4",
        {
            **{f"subspace-{m}-{bits}": _bits(m, bits) for sizes in BYTES.values() for m, bits in sizes},
            **{f"fedavg-{bits}": f"--algorithm fedavg --lr 0.4 --bits {bits}" for bits in (1, 2, 4)},
            **{f"masked-{m}-{b}": f"{_bits(m, b)} --secure-aggregation" for m, b in ((4064, 1), (2032, 2))},
        },
        seeds=(0, 1, 2),
    ),
    "bits-printed": Experiment(
        "FedRP as printed with one bit a number each way, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1 --engine stacked:4 --algorithm fedrp --projection sign --bits 1 --bits-down 1",
        {f"printed-{nbytes}": f"--dim {BYTES[nbytes][0][0]}" for nbytes in (4096, 512)},
    ),
    "bits-elsewhere": Experiment(
        "512 bytes each way where nothing was tuned, LeNet-5, 100 clients, 30 rounds, E = 1",
        "--clients 100 --rounds 30 --local-epochs 1 --engine stacked:4",
        {
            "fashion": f"--dataset fashion-mnist {_bits(*BYTES[512][0])}",
            "fashion-fedavg": f"--dataset fashion-mnist --algorithm fedavg{OWN}",  # on MNIST: see non-iid
            "dirichlet": f"--dataset mnist --partition dirichlet:0.1 {_bits(*BYTES[512][0])}",
            "shards": f"--dataset mnist --partition shards:2 {_bits(*BYTES[512][0])}",
        },
        seeds=(0, 1, 2),
    ),
    "bits-cifar": Experiment(
        "CIFAR-10 as above with one bit a number each way: 0.08 bits a parameter",
        "--dataset cifar10 --train-examples 10000 --model cnn --clients 50 --rounds 12 --local-epochs 1 "
        "--engine stacked:1",
        {"subspace": _bits(65536, 1)},
    ),
    "five-epochs": Experiment(
        "Five local epochs, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 5, default settings",
        f"{MNIST} --local-epochs 5",
        {"fedavg": DEFAULT_FEDAVG, **_subspace((1000,), OWN), **_subspace((100, 10, 1), WITHOUT)},
    ),
    "five-epochs-grid": Experiment(
        "FedAvg's learning rate (0.1 is the default), full MNIST, E = 5",
        f"{MNIST} --local-epochs 5 --algorithm fedavg",
        _fedavg_rates((0.2,)),
        seeds=(0, 1, 2),
    ),
    "bits-grid": Experiment(
        "Learning rate and server momentum of the default, 4,064 numbers of one bit each way, full MNIST, E = 1",
        f"{MNIST} --local-epochs 1 --engine stacked:4",
        {
            "default": _bits(*BYTES[512][0]),
            **{f"lr{lr}": f"{_bits(*BYTES[512][0])} --lr {lr}" for lr in (0.1, 0.4)},
            "no-momentum": f"{_bits(*BYTES[512][0])} --server-momentum 0",
        },
        seeds=(0, 1, 2),
    ),
    "bits-few-clients": Experiment(
        "The default with three clients, 3,333 images of mnist-mini each, 6 rounds, E = 1",
        "--dataset mnist-mini --clients 3 --rounds 6 --local-epochs 1",
        {
            "default": _bits(*BYTES[512][0]),
            **{f"lr{lr}": f"{_bits(*BYTES[512][0])} --lr {lr}" for lr in (0.1, 0.4)},
            "momentum": f"{_bits(*BYTES[512][0])} --server-momentum 0.5",
        },
        seeds=(0, 1, 2),
    ),
    "bits-five-epochs": Experiment(
        "The default with five local epochs, full MNIST, 100 clients, 30 rounds, E = 5",
        f"{MNIST} --local-epochs 5 --engine stacked:4",
        {"default": _bits(*BYTES[512][0]), "lr0.1": f"{_bits(*BYTES[512][0])} --lr 0.1"},
        seeds=(0, 1, 2),
    ),
    "non-iid": Experiment(
        "Clients with different data, full MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        f"{MNIST} --local-epochs 1",
        {
            f"{name}-{split}": f"--partition {split} {options}"
            for split in ("dirichlet:0.1", "shards:2")
            for name, options in {
                "fedavg": DEFAULT_FEDAVG,
                "fedavg-momentum": f"--algorithm fedavg{OWN}",
                **_subspace((1000,), OWN),
                "without": _subspace((1000,), WITHOUT)["fedrp-subspace-1000"],
            }.items()
        },
        seeds=(0, 1, 2),
    ),
    "non-iid-options": Experiment(
        "What helps with different data: m = 1,000, 100 clients, 100 images each on average, 30 rounds, E = 1",
        f"{MNIST} --train-examples 10000 --local-epochs 1 {_subspace((1000,))['fedrp-subspace-1000']}",
        {
            f"{split}{option}".replace(" ", "_"): f"--partition {split} --lr 0.2 --server-momentum {option}"
            for split in ("iid", "dirichlet:0.1", "shards:2")
            for option in (
                *("0", "0.5", "0.9", "0 --proximal 0.01"),
                *(("0 --weighting samples",) if split == "dirichlet:0.1" else ()),  # elsewhere all have equally many
            )
        },
        seeds=(0, 1, 2),
    ),
    "cifar": Experiment(
        "CIFAR-10, a fifth of the training images, the paper's GroupNorm network, 50 clients, 12 rounds, E = 1",
        "--dataset cifar10 --train-examples 10000 --model cnn --clients 50 --rounds 12 --local-epochs 1",
        {
            "fedavg": DEFAULT_FEDAVG,
            "fedadmm": "--algorithm fedadmm",
            "fedrp-10000": "--algorithm fedrp --projection sign --dim 10000",
            **_subspace((10000,)),
            "fwc": "--algorithm fwc",
        },
    ),
    # Needs the file that `python benchmarks/validation.py cifar10` writes.
    "cifar-grid": Experiment(
        "CIFAR-10, batch size and learning rate of FedAvg by images held out of the training set, the paper's network, "
        "20 clients with 200 images each, 10 rounds, E = 1",
        f"{CIFAR_HELD_OUT} --rounds 10 --algorithm fedavg --engine sequential",
        {
            f"fedavg-batch{size}-lr{lr}-momentum{momentum}": f"--lr {lr} --batch-size {size} --momentum {momentum}"
            for size, lr, momentum in (
                *((64, 0.1, 0.9), (32, 0.1, 0.9), (16, 0.1, 0.9)),
                *((16, 0.05, 0.9), (16, 0.03, 0.9), (16, 0.3, 0)),
            )
        },
    ),
    "cifar-grid-subspace": Experiment(
        "CIFAR-10, learning rate of FedRP-Subspace at 0.1 bits a parameter, as in cifar-grid",
        f"{CIFAR_HELD_OUT} --rounds 10 --batch-size 16 --engine sequential",
        {f"subspace-lr{lr}": f"{_bits(CIFAR_BITS[0.1], 1)} --lr {lr}" for lr in (0.1, 0.05)},
    ),
    "cifar-grid-augment": Experiment(
        "CIFAR-10, augmentation over 40 rounds, as in cifar-grid",
        f"{CIFAR_HELD_OUT} --rounds 40 --batch-size 16 --lr-schedule cosine --algorithm fedavg --lr 0.05 "
        "--engine sequential",
        {f"fedavg-{augment}": f"--augment {augment}" for augment in ("none", "flip-crop")},
    ),
    "cifar-40": Experiment(
        "CIFAR-10, a fifth of the training images, the paper's GroupNorm network, 50 clients, 40 rounds, E = 1",
        f"{CIFAR_FIFTH} --rounds 40 --local-epochs 1 {CIFAR_TRAINING}",
        {
            "fedavg": f"--algorithm fedavg{CIFAR_LR}",
            "fedavg-momentum": f"--algorithm fedavg --server-momentum 0.5{CIFAR_LR}",  # which the subspace mode has
            "fedadmm": f"--algorithm fedadmm{CIFAR_LR}",
            "fedrp-10000": f"--algorithm fedrp --projection sign --dim 10000{CIFAR_LR}{SELDOM}",
            **{f"subspace-{bits}": f"{_bits(size, 1)}{CIFAR_LR}" for bits, size in CIFAR_BITS.items()},
            **{f"fedavg-dp-{e}": f"--algorithm fedavg-dp --dp-epsilon {e}{CIFAR_LR}" for e in (5, 10, 40)},
            "fwc": f"--algorithm fwc{CIFAR_LR}{SELDOM}",
        },
    ),
    "cifar-full": Experiment(
        "CIFAR-10, all training images, the paper's GroupNorm network, 50 clients, 40 rounds, E = 1",
        f"{CIFAR} --rounds 40 --local-epochs 1 {CIFAR_TRAINING}",
        {
            "fedavg": f"--algorithm fedavg{CIFAR_LR}",
            **{f"subspace-{bits}": f"{_bits(size, 1)}{CIFAR_LR}" for bits, size in CIFAR_BITS.items()},
        },
    ),
    "cifar-five-epochs": Experiment(
        "CIFAR-10, a fifth of the training images, the paper's GroupNorm network, 50 clients, 20 rounds, E = 5",
        f"{CIFAR_FIFTH} --rounds 20 --local-epochs 5 {CIFAR_TRAINING}",
        {
            "fedavg": f"--algorithm fedavg{CIFAR_LR}",
            "fedrp-10000": f"--algorithm fedrp --projection sign --dim 10000{CIFAR_LR}{SELDOM}",
            "subspace-0.1": f"{_bits(CIFAR_BITS[0.1], 1)}{CIFAR_LR}",
        },
    ),
    "cifar-dims": Experiment(
        "CIFAR-10, sensitivity to m, a fifth of the training images, 50 clients, 20 rounds, E = 1",
        f"{CIFAR_FIFTH} --rounds 20 --local-epochs 1 {CIFAR_TRAINING}",
        {
            **_subspace((100, 1000, 5000, 10000, 50000), CIFAR_LR),
            **{
                f"fedrp-{m}": f"--algorithm fedrp --projection sign --dim {m}{CIFAR_LR}{SELDOM}"
                for m in (100, 10000, 50000)
            },
        },
    ),
    **{
        f"private-{epsilon}": Experiment(
            f"Client-level ({epsilon}, 1e-5): the grid of each method, 100 clients with 100 images of MNIST each, "
            "20 rounds",
            f"{PRIVATE} --dp-epsilon {epsilon}",
            {
                f"{name}-clip{clip}-lr{lr}-momentum{momentum}": _private(name, clip, lr, momentum)
                for name in ("fedrp-subspace-100", *COMPARED)
                for momentum in (0, 0.5)
                for clip in (0.1, 0.3, 1)
                for lr in (0.3, 1)
                if momentum == 0 or (name in COMPARED and (clip, lr) != (1, 0.3))
            },
        )
        for epsilon in EPSILONS
    },
    "private-slow": Experiment(
        "Client-level (10, 1e-5), 100 images a client: learning rate 0.1, without momentum",
        f"{PRIVATE} --dp-epsilon 10",
        {
            f"{name}-clip{clip}": _private(name, clip, 0.1)
            for name, clip in (
                ("fedavg-dp", 0.1),
                ("fedavg-dp", 0.3),
                ("fedavg-dp", 1),
                ("fedrp-subspace-1000", 0.1),
                ("fedrp-subspace-1000", 0.3),
                ("fedrp-subspace-10000", 0.3),
            )
        },
    ),
    "private-default": Experiment(
        "Client-level (10, 1e-5), 100 images a client: learning rate and momentum as they are by default, two clips",
        f"{PRIVATE} --dp-epsilon 10",
        {
            f"{name}-clip{clip}": _private(name, clip, *rest)
            for name, rest in zip(COMPARED, ((0.1, 0), (0.2, 0.5), (0.2, 0.5)), strict=True)
            for clip in (0.3, 1)
        },
        seeds=(0, 1, 2),
    ),
    **{
        f"private-best-{epsilon}": Experiment(
            f"Client-level ({epsilon}, 1e-5): the best of each grid again, with seeds that did not choose it",
            f"{PRIVATE} --dp-epsilon {epsilon}",
            {
                f"{name}-clip{clip}-lr{lr}-momentum{momentum}": _private(name, clip, lr, momentum)
                for name, clip, lr, momentum in best
            },
            seeds=(1, 2, 3),
        )
        for epsilon, best in PRIVATE_BEST.items()
    },
    "private-1000": Experiment(
        "What clipping alone costs: (1000, 1e-5), where the noise is small",
        f"{PRIVATE} --dp-epsilon 1000",
        {
            f"{name}-clip{clip}-lr{lr}": _private(name, clip, lr)
            for name, clip, lr in (
                ("fedavg-dp", 0.3, 0.3),
                ("fedavg-dp", 1, 0.3),
                ("fedrp-subspace-1000", 0.3, 1),
                ("fedrp-subspace-10000", 0.3, 0.3),
                ("fedrp-subspace-10000", 1, 0.3),
            )
        },
    ),
    **{
        f"private-full-{epsilon}": Experiment(
            f"Client-level ({epsilon}, 1e-5) with all of MNIST, 600 images a client, 20 rounds, clip 0.3",
            f"{PRIVATE_FULL} --dp-epsilon {epsilon}",
            {
                f"{name}-lr{lr}-momentum{momentum}": _private(name, 0.3, lr, momentum)
                for name in COMPARED
                for lr, momentum in ((0.1, 0), (0.3, 0), (0.1, 0.5))
            },
            seeds=(0, 1, 2),
        )
        for epsilon in EPSILONS
    },
    "records": Experiment(
        "Patient-level (3, 1e-5) at each of 10 sites with 6,000 images of MNIST, noise local, 30 rounds",
        f"--dataset mnist --clients 10 --dp-epsilon 3 {RECORDS}",
        RECORD_METHODS,
        seeds=(0, 1, 2),
    ),
    # Needs the file that `python benchmarks/validation.py mnist` writes.
    "records-grid": Experiment(
        "Patient-level (3, 1e-5), settings by images held out of the training set: 10 sites with 5,400 images of "
        "MNIST, 30 rounds",
        f"{RECORDS_HELD_OUT} {RECORD_METHODS['subspace']}",
        {
            f"batch{size}-lr{lr}-momentum{carried}-{schedule}-clip{clip}": (
                f"--batch-size {size} --lr {lr} --server-momentum {carried} --lr-schedule {schedule} --clip {clip}"
            )
            for size, lr, carried, schedule, clip in (
                (256, 1, 0.5, "constant", 1),
                (256, 1, 0.5, "cosine", 1),
                (256, 2, 0.5, "cosine", 1),
                (256, 0.5, 0.5, "cosine", 1),
                (256, 1, 0, "cosine", 1),
                (512, 1, 0.5, "cosine", 1),
                (256, 1, 0.5, "cosine", 0.5),
            )
        },
    ),
    "records-epsilon": Experiment(
        "Patient-level at other epsilons, 10 sites with 6,000 images of MNIST, 30 rounds",
        f"--dataset mnist --clients 10 {RECORDS}",
        {
            f"{name}-{epsilon}": f"--dp-epsilon {epsilon} {options}"
            for epsilon in (1, 8)
            for name, options in RECORD_METHODS.items()
        },
    ),
    "records-dims": Experiment(
        "Patient-level (3, 1e-5) by m, 10 sites with 6,000 images of MNIST, 30 rounds",
        f"--dataset mnist --clients 10 --dp-epsilon 3 {RECORDS} --algorithm fedrp-subspace --bits 8 --bits-down 8",
        {f"subspace-{m}": f"--dim {m}" for m in (508, 16380)},
    ),
    "records-shared": Experiment(
        "Patient-level (3, 1e-5), noise shared under masks: 10 sites with 6,000 images of MNIST, one step a round",
        f"--dataset mnist --clients 10 --dp-epsilon 3 {RECORDS_SHARED} --batch-size 6000",
        {f"subspace-rounds{rounds}": f"--rounds {rounds}" for rounds in (30, 100)},
    ),
    "records-shared-fifth": Experiment(
        "Patient-level (3, 1e-5), noise shared under masks: 10 sites with 1,200 images of MNIST, one step a round",
        f"--dataset mnist --train-examples 12000 --clients 10 --dp-epsilon 3 {RECORDS_SHARED} --batch-size 1200",
        {"subspace-rounds30": "--rounds 30"},
    ),
    "records-few": Experiment(
        "Patient-level (3, 1e-5), the hard case: 5 sites with 1,000 images of MNIST, 30 rounds",
        f"--dataset mnist --train-examples 5000 --clients 5 --dp-epsilon 3 {RECORDS}",
        RECORD_METHODS,
        seeds=(0, 1, 2),
    ),
    "records-fashion": Experiment(
        "Patient-level (3, 1e-5), nothing tuned: 10 sites with 6,000 images of Fashion-MNIST, 30 rounds",
        f"--dataset fashion-mnist --clients 10 --dp-epsilon 3 {RECORDS}",
        RECORD_METHODS,
        seeds=(0, 1, 2),
    ),
    "private-few": Experiment(
        "What noise lets a run learn: fewer clients or a smaller epsilon, 10,000 images of MNIST, 20 rounds",
        PRIVATE.replace(" --clients 100", ""),
        {
            f"{name}-clip{clip}-clients{clients}-epsilon{epsilon}": (
                f"--clients {clients} --dp-epsilon {epsilon} {_private(name, clip, lr)}"
            )
            for clients, epsilon in ((10, 10), (10, 30), (10, 100), (30, 3), (30, 10), (100, 1), (100, 2), (3, 100))
            for name, clip, lr in (
                ("fedavg-dp", 0.3, 0.3),
                ("fedrp-subspace-1000", 0.3, 0.2),
                ("fedrp-subspace-1000", 0.03, 0.2),
            )
        },
    ),
    "fashion": Experiment(
        "Not used to choose any default: Fashion-MNIST, LeNet-5, 100 clients, 30 rounds, E = 1",
        "--dataset fashion-mnist --clients 100 --rounds 30 --local-epochs 1",
        {
            "fedavg": DEFAULT_FEDAVG,
            "fedavg-0.2": "--algorithm fedavg --lr 0.2",
            "fedavg-0.4": "--algorithm fedavg --lr 0.4",
            **_subspace((1000,), OWN),
            **_subspace((100,), WITHOUT),
            "without": _subspace((1000,), WITHOUT)["fedrp-subspace-1000"],
        },
        seeds=(0, 1, 2),
    ),
}
