"""From YAML text to nodes: events, composition, scalars, merges, and errors at the user's line."""
