"""`fgcli`: one module a command, loaded when it is chosen."""
