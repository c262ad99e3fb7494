"""Views of a loaded config: who wrote each value, how two configs differ, what stands at a path."""
