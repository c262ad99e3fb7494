"""Findings about a config that is correct YAML: slips in its text, and calls that do not fit what they call."""
