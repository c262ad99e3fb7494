"""Views of a loaded config: the origin of each value, the differences of two configs, the value at a path."""
