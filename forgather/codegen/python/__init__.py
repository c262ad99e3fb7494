"""Parts of the Python generator: expressions and statements, names, imports, and the lowering of nodes to them."""
