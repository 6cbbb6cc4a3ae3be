"""Operators that reduce dimensions or run along them: sums, norms, cumulative sums, sorting,
counting.
"""
