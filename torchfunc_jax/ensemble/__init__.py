"""Ensembles and populations of torch modules that are trained in one program, on one device or on many."""
from torchfunc_jax.ensemble.life import early_stop, exploit, halve
from torchfunc_jax.ensemble.members import Ensemble
from torchfunc_jax.ensemble.state import TrainState
from torchfunc_jax.ensemble.training import Trainer

__all__ = [
    "Ensemble",
    "TrainState",
    "Trainer",
    "early_stop",
    "exploit",
    "halve",
]
