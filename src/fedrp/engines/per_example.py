"""Per-example gradients: what each example alone would have a model change."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.func import functional_call, grad, vmap

from fedrp.errors import ConfigError, first_line
from fedrp.learning.pixels import Inputs
from fedrp.learning.trainer import LocalModel, batch_input


@dataclass(frozen=True)
class PerExample:
    """Gradients of single examples of a model, by `torch.func`: an example is a batch of its own.

    Guarantees: the gradient of an example depends on no other, but for rounding, whatever the layers are.
    """

    model: LocalModel

    def gradients(self, weights: torch.Tensor, x: Inputs, y: torch.Tensor, microbatch: int) -> Iterator[torch.Tensor]:
        """The gradients (b, n) at `weights` (n,), of at most `microbatch` examples at a time, in order.

        Raises:
            ConfigError: a layer of the model cannot be computed example by example.
        """
        module, layout = self.model.module, self.model.layout
        fixed = {name: tensor.detach() for name, tensor in module.named_buffers()}
        fixed |= {name: tensor.detach() for name, tensor in module.named_parameters() if not tensor.requires_grad}

        def loss_of(values: dict[str, torch.Tensor], inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            outputs = functional_call(module, (fixed, values), (inputs.unsqueeze(0),))
            return self.model.loss(outputs, target.unsqueeze(0))

        values = dict(zip(layout.names, layout.views(weights), strict=True))
        each = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")
        for first in range(0, len(y), microbatch):
            part = slice(first, first + microbatch)
            try:
                found = each(values, batch_input(x[part], self.model.device), y[part])
            except RuntimeError as error:
                raise ConfigError(f"records cannot be protected with this model: {first_line(error)}") from error
            yield torch.cat([found[name].flatten(1) for name in layout.names], dim=1)
