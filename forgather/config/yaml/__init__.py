"""The YAML front end: events, composition into nodes, scalars, merge keys, and errors at the user's line."""
