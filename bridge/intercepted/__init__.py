"""PyTorch's Python that has meanings of its own in a trace: autograd.Function, checkpoint, control flow, hooks, functions."""
