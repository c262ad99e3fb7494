"""Findings about a config, one module for each kind. `project/check.py` calls them all."""
