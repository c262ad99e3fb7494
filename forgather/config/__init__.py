"""The modules of the config language, which turn the text of a config into objects.

Each of the stages `render`, `load`, `override` and `materialize` is a module with a function of the same name
(`from forgather.config.render import render`).
"""
