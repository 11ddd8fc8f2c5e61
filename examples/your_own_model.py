"""Five hospitals train a model of your own on data of your own, with any loss; nobody shows anyone data or model."""

import torch
from torch import nn

import fedrp

inputs = torch.randn(3000, 20, generator=torch.Generator().manual_seed(1))
targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3].sin()
task = fedrp.Task(
    model=lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)),
    train=(inputs[:2500], targets[:2500]),  # or a list with the data of each client
    test=(inputs[2500:], targets[2500:]),
    loss=nn.functional.smooth_l1_loss,
    correct=lambda outputs, targets: ((outputs - targets).abs() < 0.5).float(),  # what counts as right
)
result = fedrp.simulate(fedrp.RunConfig(algorithm="fedrp", clients=5, rounds=10, dim=100), task)
model = fedrp.load_vector(task.model(), result.model)
print(f"right within 0.5: {result.accuracy:.1f} %; the first test output: {model(inputs[2500]).item():.2f}")
