"""The configuration tower. Each stage is a module with one function of its name; import from the module:
`from forgather.config.render import render`, then `load`, `check`, `materialize`.
"""
