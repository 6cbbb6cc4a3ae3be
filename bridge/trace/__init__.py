"""Runs torch code on JAX values: the traced tensor, its memory and levels, random keys, checks of
values, constants.
"""
