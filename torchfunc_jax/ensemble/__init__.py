"""Ensembles and populations of torch modules that are trained in one program, on one device or on many."""
from torchfunc_jax.ensemble.checkpointing import Checkpoints, Preempted
from torchfunc_jax.ensemble.members import Ensemble
from torchfunc_jax.ensemble.processes import LOST, ProcessError, initialize, launch
from torchfunc_jax.ensemble.training import Trainer, TrainState

__all__ = [
    "Checkpoints",
    "Ensemble",
    "LOST",
    "Preempted",
    "ProcessError",
    "TrainState",
    "Trainer",
    "initialize",
    "launch",
]
