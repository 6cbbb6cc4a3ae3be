"""PyTorch's Python functions that a trace replaces: autograd.Function, checkpoint, control flow,
hooks, and single functions.
"""
