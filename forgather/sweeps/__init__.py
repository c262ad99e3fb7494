"""Sweeps: many runs of one config with other values, started, stopped early, resumed and compared.

The input is a config with a sweep; the output is a folder with a run for each trial. A sweep has no database: its
journal says which trials exist, and run folders say how they ended.
"""
