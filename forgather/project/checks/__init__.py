"""Checks of a config, one module for each kind; `project/check.py` calls all of them."""
