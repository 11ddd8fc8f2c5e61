"""The table of algorithms. To add one: a file with an `Algorithm` record, and a line here."""

from fedrp.algorithms.base import Algorithm as Algorithm
from fedrp.algorithms.fedadmm import FEDADMM
from fedrp.algorithms.fedavg import FEDAVG, FWC
from fedrp.algorithms.fedavg_dp import FEDAVG_DP
from fedrp.algorithms.fedrp import FEDRP
from fedrp.algorithms.subspace import SUBSPACE

ALGORITHMS: dict[str, Algorithm] = {
    "fedrp-subspace": SUBSPACE,
    "fedrp": FEDRP,
    "fedavg": FEDAVG,
    "fedavg-dp": FEDAVG_DP,
    "fedadmm": FEDADMM,
    "fwc": FWC,
}
