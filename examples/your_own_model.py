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
    loss=nn.functional.l1_loss,  # numbers and no classes: the run is judged by its loss, the less the better
)
result = fedrp.simulate(fedrp.RunConfig(algorithm="fedrp", clients=5, rounds=10, dim=100), task)
model = fedrp.load_vector(task.model(), result.model)
print(f"off by {result.loss:.2f} on average; the first test output: {model(inputs[2500]).item():.2f}")
