"""The commands of `fgcli`. Each module has `configure(parser)` and `run(invocation) -> int` (the exit status).

A module can also set these constants:

* `CONFIG_OPTIONS = True`: the command takes `-t` and the options that the config declares.
* `OPTIONS_UNTOLD = True`: the help of the command does not list the options of the config.
* `TAKES_CONFIG = True`: the command takes `-t`, but not the options of the config.
* `EXECUTES = True`: the command imports and calls the code that the config names.
* `TRAINS = True`: the command continues when its standard output is closed.
* `HANDS_THROUGH = True`: the arguments after `--` are passed to the program that the command starts.
* `TROUBLE`: the exit status after an error, if it is not 1.
"""
