"""The table of algorithms. To add one: a file with an `Algorithm` record, and a line here."""

from fedrp.algorithms.base import Algorithm as Algorithm
from fedrp.algorithms.fedadmm import FEDADMM
from fedrp.algorithms.fedavg import FEDAVG, FWC
from fedrp.algorithms.fedavg_dp import FEDAVG_DP
from fedrp.algorithms.fedrp import FEDRP
from fedrp.algorithms.subspace import SUBSPACE
from fedrp.config import RunConfig, settled
from fedrp.projection import projection_tag

ALGORITHMS: dict[str, Algorithm] = {
    "fedrp-subspace": SUBSPACE,
    "fedrp": FEDRP,
    "fedavg": FEDAVG,
    "fedavg-dp": FEDAVG_DP,
    "fedadmm": FEDADMM,
    "fwc": FWC,
}


def wire_tag(config: RunConfig) -> int:
    """What messages of this run carry as their projection: family and version, or 0 where there is no secret matrix."""
    return projection_tag(settled(config.projection)) if ALGORITHMS[config.algorithm].secret else 0
