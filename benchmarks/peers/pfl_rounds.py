"""pfl: its own FederatedAveraging on its simulated backend; with several cores under torchrun, a process for each."""

import functools

import numpy as np
import peer_task
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel


class Net(torch.nn.Module):
    """LeNet-5 with the loss that pfl asks a module for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = peer_task.lenet5()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.train()
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, _x: torch.Tensor, _y: torch.Tensor) -> dict[str, float]:
        return {}


class Rounds(TrainingProcessCallback):  # type: ignore[misc]
    """A clock at the end of each round, which is where the next one begins."""

    def __init__(self, clock: peer_task.Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *, model: object) -> Metrics:  # noqa: ARG002 - as pfl calls it
        self.clock.begin()
        return Metrics()

    def after_central_iteration(
        self,
        aggregate_metrics: object,  # noqa: ARG002
        model: object,  # noqa: ARG002
        *,
        central_iteration: int,
    ) -> tuple[bool, Metrics]:
        self.clock.end()
        if central_iteration + 1 < SIZE.rounds:
            self.clock.begin()
        return False, Metrics()


SIZE = peer_task.size_of()


def main() -> None:
    torch.set_num_threads(1)
    set_framework_module(pytorch_ops)
    np.random.seed(0)  # pfl samples from the global generator
    images, labels = peer_task.data(SIZE.clients, SIZE.examples)

    def dataset_of(user: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset(tensors=(images[user], labels[user]), user_id=str(user))

    data = FederatedDataset(dataset_of, get_user_sampler("minimize_reuse", list(range(SIZE.clients))))
    net = Net()
    model = PyTorchModel(
        net,
        functools.partial(torch.optim.SGD, momentum=peer_task.MOMENTUM),  # pfl gives it the learning rate
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    clock = peer_task.Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=SIZE.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=SIZE.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=peer_task.LEARNING_RATE, local_batch_size=SIZE.batch
        ),
        NNEvalHyperParams(local_batch_size=None),
        [Rounds(clock)],
    )
    if pytorch_ops.distributed.global_rank == 0:
        clock.say()


if __name__ == "__main__":
    main()
