"""Commands, one module per group. A command checks its arguments and then imports the code that does the work."""
