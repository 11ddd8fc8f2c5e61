"""fluke: its own FedAVG, one process; torch gets all cores as threads."""

import peer_task
import torch

# PyPI's torchvision is built for a torch with CUDA and does not load its operators here; fluke imports data sets and
# models from it, which this task does not use. Declared, they let the import pass; nothing of it is called.
_operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for name in ("nms", "qnms"):
    _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.utils import FederationObserver


class Rounds(FederationObserver):  # type: ignore[misc]
    """A clock."""

    def __init__(self, clock: peer_task.Clock) -> None:
        self.clock = clock

    def start_round(self, round: int, global_model: object) -> None:  # noqa: ARG002 - as fluke calls it
        self.clock.begin()

    def end_round(self, round: int) -> None:  # noqa: ARG002
        self.clock.end()


def main() -> None:
    size = peer_task.size_of()
    torch.set_num_threads(size.cores)
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    images, labels = peer_task.data(size.clients, size.examples)
    x, y = images.flatten(0, 1), labels.flatten()
    splitter = DataSplitter(DataContainer(x, y, x[:100], y[:100], peer_task.CLASSES), distribution="iid")
    settings = DDict(
        client=DDict(
            batch_size=size.batch,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=peer_task.LEARNING_RATE, momentum=peer_task.MOMENTUM),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
        ),
        server=DDict(weighted=False),
        model=peer_task.lenet5(),
    )
    clock = peer_task.Clock()
    algorithm = FedAVG(size.clients, splitter, settings)
    algorithm.set_callbacks([Rounds(clock)])
    algorithm.run(size.rounds, 1.0, finalize=False)
    clock.say()


if __name__ == "__main__":
    main()
