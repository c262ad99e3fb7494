"""The commands. Each module has `configure(parser)` and `run(invocation) -> int`, the exit status.

`CONFIG_OPTIONS = True` says that a command takes the options that the config declares, and `--set`;
`OPTIONS_UNTOLD = True` that its help does not list them;
`EXECUTES = True` that it imports and calls what the config names.
"""
