"""Operators that act on each element: arithmetic, comparison, elementary functions, complex
numbers.
"""
