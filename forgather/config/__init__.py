"""The configuration tower: from the text of a config to objects.

Each stage is a module with a function of its name, which is imported from there (`from forgather.config.render import
render`): `render`, `load`, `override`, `materialize`.
"""
