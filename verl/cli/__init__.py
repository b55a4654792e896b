"""The `verl` command: one file per group of commands, each thin: parse, call, print."""
