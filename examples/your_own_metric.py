"""Five hospitals look for a rare disease: where 5 % have it, accuracy tells little and the AUROC what matters."""

import torch
from torch import nn

import fedrp


def auroc(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # or one of torchmetrics.functional
    scores = outputs[:, 1] - outputs[:, 0]
    return (scores[targets == 1, None] > scores[targets == 0]).float().mean()  # how often an ill person is above


inputs = torch.randn(4000, 20, generator=torch.Generator().manual_seed(1))
targets = (inputs[:, :4].sum(dim=1) > 3.3).long()
task = fedrp.Task(
    model=lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)),
    train=(inputs[:3000], targets[:3000]),
    test=(inputs[3000:], targets[3000:]),
    metrics={"auroc": auroc},  # the first one is what the run is judged by; goal="min" if less is better
)
config = fedrp.RunConfig(algorithm="fedrp-subspace", clients=5, rounds=10, dim=100)
result = fedrp.simulate(config, task, keep="best")
print(f"AUROC {result.metrics['auroc']:.3f} after round {result.delivered_round}; accuracy {result.accuracy:.1f} %")
