"""Views of a loaded config: the origins of its values, its differences from another config, and the value at a path."""
