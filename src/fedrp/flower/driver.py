"""The server's run over a Flower grid: what is left of it, what is told of each round, who has the last model.

The rounds are those of `fedrp.protocol.rounds`; one exchange each in the normal case.
"""

import os

import numpy as np
from flwr.serverapp import Grid

from fedrp.flower.carrier import GridCarrier, Say, troubles
from fedrp.flower.messages import FINISH
from fedrp.flower.settings import Pacing
from fedrp.mechanisms.cohort import Coins
from fedrp.protocol import server as server_side
from fedrp.protocol.rounds import ClosedRound, begin, rounds
from fedrp.protocol.server_state import Server
from fedrp.storage.server import ServerFolder


def drive(grid: Grid, server: Server, folder: ServerFolder, pacing: Pacing, say: Say) -> Server:
    """Run what is left of a run, and return the server at its end. Everything that was completed is in the folder.

    Raises:
        QuorumError: too few sites for too long. Nothing is lost: drive again with the same folder.
    """
    carrier = GridCarrier(grid, server.run, server.context, server.config.clients, pacing, say, note=folder.report)
    folder.report({**_about(server), "finished": False})
    if server.round:
        say(f"going on after round {server.round}")
    server = begin(server, carrier, folder, pacing.min_clients or server.config.clients)
    carrier.take_bytes()  # those of the set-up are no round's
    for closed in rounds(server, carrier, folder, _coins):
        server = closed.server
        _tell(closed, carrier, folder)
    _finish(server, carrier, folder)
    return server


def _tell(closed: ClosedRound, carrier: GridCarrier, folder: ServerFolder) -> None:
    """Log and report a round, or the exchange of models after the last one."""
    server, report, answers = closed.server, closed.report, closed.answers
    name = "the average of the models" if closed.is_delivery else f"round {server.round}"
    refused = {**answers.refused, **report.refused}
    bytes_up, bytes_down = carrier.take_bytes()
    if report.void:
        carrier.say(f"{name} was given up: {report.void}")
    line = {
        "round": _rounds_done(server),
        "void": report.void,
        "participants": list(report.participants),
        "refused": refused,
        "absent": sorted(answers.absent),
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "seconds": round(closed.seconds, 3),
    }
    folder.log("delivery" if closed.is_delivery else "round", line)
    folder.report({**line, **_about(server), "sites": carrier.names(), "finished": False})
    told = troubles(answers._replace(refused=refused), carrier.called)
    of = "" if closed.is_delivery else f"/{server.settings.rounds}"
    carrier.say(f"{name}{of}: {len(report.participants)} clients {told}")


def _coins(server: Server) -> Coins:
    """What chooses participants, from the system's entropy: sampling protects nobody if its coins can be foreseen."""
    words = np.frombuffer(os.urandom(8 * server.config.clients), "<u8")
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, np.float64)


def _finish(server: Server, carrier: GridCarrier, folder: ServerFolder) -> None:
    """Give everyone what the last model needs. Who is away gets it when the app is run again with the same store."""
    everyone, served = tuple(range(server.config.clients)), folder.served()
    if lacking := tuple(client for client in everyone if client not in served):
        carrier.look_again()  # a round that was just closed may have lost someone, who would be waited for in vain
        carrier.gather(1)
        packets, reached = server_side.finish(server, lacking), set[int]()
        carrier.carry(FINISH, server.round, packets, 0 if served else 1, lambda client, _reply: reached.add(client))
        served |= reached
        folder.keep_served(served)
    missing = sorted(set(everyone) - served)
    folder.log("finish", {"delivered": sorted(served), "missing": missing})
    folder.report({**_about(server), "finished": True, "missing": missing})
    if missing:
        names = ", ".join(map(carrier.called, missing))
        carrier.say(f"without the last model: {names}; run again with the same store to deliver it")
    carrier.say(f"finished after {_rounds_done(server)} rounds; {len(served)} sites have the model")


def _rounds_done(server: Server) -> int:
    """How many rounds are over, the exchange of models after them not counted."""
    return min(server.round, server.settings.rounds)


def _about(server: Server) -> dict[str, object]:
    config = server.settings
    return {
        "role": "server",
        "run": server.run.hex(),
        "algorithm": config.algorithm,
        "round": _rounds_done(server),
        "rounds": config.rounds,
        "clients": config.clients,
    }
