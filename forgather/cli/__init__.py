"""The command-line program `fgcli`: each command has a module, which is imported when the command is chosen."""
