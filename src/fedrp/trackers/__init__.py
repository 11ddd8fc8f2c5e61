"""Trackers of experiments: what a run measures, for TensorBoard, MLflow or Weights & Biases. All of it stays on disk.

    with trackers.tensorboard("runs/mine") as tracker:
        result = fedrp.simulate(config, task, out="runs/mine", on_round=tracker)
        tracker.finish(result)

Several at once, and callbacks of your own with them: `trackers.together(first, second, ...)`.
"""

from fedrp.trackers.choice import mlflow, tensorboard, tracking, wandb
from fedrp.trackers.tracker import Together, Tracker, together

__all__ = ["Together", "Tracker", "mlflow", "tensorboard", "together", "tracking", "wandb"]
