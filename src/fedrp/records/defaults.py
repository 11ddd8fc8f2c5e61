"""Defaults of local training under noise for records, chosen on held-out images (docs/results.md, `records-grid`)."""

import dataclasses

from fedrp.config.run import Resolved, RunConfig
from fedrp.config.schedule import CONSTANT

BATCH_SIZE, SERVER_MOMENTUM = 256, 0.5
LR_FACTOR = 10.0  # the learning rate, in units of the model's: clipped gradients are short, and noise wants few steps
_MOMENTUM, _LR_SCHEDULE = 0.5, "cosine"


def training_defaults(config: RunConfig) -> RunConfig:
    """The config with batch size, momentum and schedule where none is given: other ones where records are protected."""
    protected = config.record_private
    schedule = CONSTANT if config.sums_records else _LR_SCHEDULE  # one step a round is never too many
    return dataclasses.replace(
        config,
        batch_size=config.batch_size or (BATCH_SIZE if protected else Resolved.batch_size),
        momentum=config.momentum if config.momentum is not None else (_MOMENTUM if protected else Resolved.momentum),
        lr_schedule=config.lr_schedule or (schedule if protected else Resolved.lr_schedule),
    )
