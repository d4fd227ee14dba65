"""The commands, a file a group. A command checks what is typed; what it does is imported when it is asked to."""
