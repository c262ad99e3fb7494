"""What can be wrong with a config besides its graph: a module for each kind of finding, joined by `project/check.py`."""
