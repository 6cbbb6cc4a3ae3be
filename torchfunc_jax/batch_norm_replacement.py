"""Batch normalization without running statistics, so that a module can be mapped over samples."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def replace_all_batch_norm_modules_(root: nn.Module) -> nn.Module:
    """Make every BatchNorm of a module always use the statistics of its batch, and keep no running
    statistics.

    Args:
        root: any nn.Module, changed in place.

    Returns:
        nn.Module: root.

    Source: https://docs.pytorch.org/docs/stable/func.batch_norm.html

    Example:
        >>> import torch
        >>> from torchfunc_jax import replace_all_batch_norm_modules_
        >>> net = replace_all_batch_norm_modules_(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))
        >>> list(net.buffers()), net[0].track_running_stats
        ([], False)
    """
    for m in root.modules():
        if isinstance(m, _BatchNorm) and m.track_running_stats:
            m.running_mean = m.running_var = m.num_batches_tracked = None
            m.track_running_stats = False
    return root
