"""Parts of the Python writer: expressions and statements, names, imports, and the passes that make them of a graph."""
