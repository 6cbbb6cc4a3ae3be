"""Ensembles and populations of torch modules that are trained in one program, on one device or on
many.
"""

from torchfunc_jax.ensemble import metrics
from torchfunc_jax.ensemble.calibration import fit_joint_temperature, fit_temperature
from torchfunc_jax.ensemble.checkpointing import Checkpoints, Preempted
from torchfunc_jax.ensemble.dry_run import Collective, Price, dry_run
from torchfunc_jax.ensemble.life import early_stop, exploit, halve
from torchfunc_jax.ensemble.members import Ensemble
from torchfunc_jax.ensemble.prediction import Classification, Regression, predict
from torchfunc_jax.ensemble.processes import LOST, ProcessError, initialize, launch
from torchfunc_jax.ensemble.sinks import JsonLines, Sink, TensorBoard, Wandb
from torchfunc_jax.ensemble.state import TrainState
from torchfunc_jax.ensemble.training import Trainer

__all__ = [
    "Checkpoints",
    "Classification",
    "Collective",
    "Ensemble",
    "JsonLines",
    "LOST",
    "Preempted",
    "Price",
    "ProcessError",
    "Regression",
    "Sink",
    "TensorBoard",
    "TrainState",
    "Trainer",
    "Wandb",
    "dry_run",
    "early_stop",
    "exploit",
    "fit_joint_temperature",
    "fit_temperature",
    "halve",
    "initialize",
    "launch",
    "metrics",
    "predict",
]
