"""The ServerApp: settings in, a driven run out."""

import logging
import warnings
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrp.algorithms.resolve import resolved
from fedrp.errors import ConfigError, FedRPError
from fedrp.flower.driver import drive
from fedrp.flower.settings import run_settings
from fedrp.learning.layout import ModelFactory, built, layout_of
from fedrp.mechanisms.outlook import outlook_of
from fedrp.protocol.server_state import new_server
from fedrp.storage.server import ServerFolder

_LOG = logging.getLogger("flwr")  # what Flower shows with `flwr run --stream`


def server_app(model: ModelFactory) -> ServerApp:
    """A ServerApp for a model, which it needs only to count the parameters."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(grid, context, model)
        except FedRPError as error:
            _LOG.error("fedrp: %s", error)
            raise

    return app


def serve(grid: Grid, context: Context, model: ModelFactory) -> None:
    """Drive the run that the context describes."""
    config, pacing = run_settings(context.run_config)
    if not pacing.store:
        raise ConfigError("the run config has no store: set it to a folder on the server for the state of this run")
    if pacing.min_clients > config.clients:
        raise ConfigError(f"min_clients={pacing.min_clients} is more than clients={config.clients}")
    parameters = parameter_count(model)
    config = resolved(config, parameters)
    if outlook := outlook_of(config, parameters):
        _LOG.warning("fedrp: %s", outlook)
    with ServerFolder.open(Path(pacing.store), config) as folder:
        server = folder.load(new_server(config, folder.run, parameters))
        drive(grid, server, folder, pacing, lambda text: _LOG.info("fedrp: %s", text))


def parameter_count(model: ModelFactory) -> int:
    """Number of parameters of a model, counted on its shapes: the server never holds its numbers."""
    with torch.device("meta"), warnings.catch_warnings():
        # Pretrained weights have no place to go here, nor should they.
        warnings.filterwarnings("ignore", "for .* copying from a non-meta parameter")
        return layout_of(built(model)).size
