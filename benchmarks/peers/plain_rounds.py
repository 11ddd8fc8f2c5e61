"""The plain loop over the same task, in as many processes as there are cores to use. Runs where fedrp is installed."""

import peer_task
from fedrp_rounds import config_of, task_of

from fedrp.benchmarking.plain_loop import Reference


def main() -> None:
    size, clock = peer_task.size_of(), peer_task.Clock()
    reference = Reference(config_of(size), task_of(size), size.cores)
    try:
        for _ in range(size.rounds):
            clock.begin()
            reference.round()
            clock.end()
    finally:
        reference.stop()
    clock.say()


if __name__ == "__main__":
    main()
