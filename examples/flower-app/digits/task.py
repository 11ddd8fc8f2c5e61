"""What is learned: the model, and the images of each site. At a real site, load your own files here."""

from torch import nn

from fedrp.flower import ClientContext, LocalTask
from fedrp.learning.task import named_task, split_among_clients
from fedrp.learning.zoo import MODELS


def model() -> nn.Module:
    return MODELS["lenet5"].build((1, 28, 28), 10)


def load(site: ClientContext) -> LocalTask:
    everything = named_task(site.config)  # the bundled images, of which this site takes its share
    share = split_among_clients(everything, site.config)[site.index]
    return LocalTask(model, train=(share.x, share.y), test=everything.test)
