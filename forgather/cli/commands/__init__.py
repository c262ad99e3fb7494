"""The commands. Each module has `configure(parser)` and `run(invocation) -> int`, which returns the exit status.

Flags of a module, all of them optional:

* `CONFIG_OPTIONS = True`: the command takes the options that the config declares, and `--set`.
* `OPTIONS_UNTOLD = True`: its help does not list those options.
* `TAKES_CONFIG = True`: the command takes `-t`, but not the options of the config.
* `EXECUTES = True`: it imports and calls what the config names.
* `TRAINS = True`: a closed output does not end it.
* `HANDS_THROUGH = True`: words after `--` are passed to the program that it starts.
* `TROUBLE`: the exit status after an error, if it is not 1.
"""
