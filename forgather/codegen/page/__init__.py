"""The page of a config: its graph, its templates and its text in one HTML file without external resources."""
