"""Operators that read or write elements by index, by mask or by segment."""
