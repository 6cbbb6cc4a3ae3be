"""Operators that create tensors, copy them or change their shape."""
