"""Programs for machines without PyTorch: a torch function as StableHLO, with sizes that are known
only when it runs.
"""
