"""What is done with each ATen operator: views, in-place writes, decompositions, refused dtypes,
special cases.
"""
