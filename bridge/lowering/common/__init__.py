"""Helpers for lowerings of every family: PyTorch's type promotion, builders of element-wise
operators, checks of values.
"""
