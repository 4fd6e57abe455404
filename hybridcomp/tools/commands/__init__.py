"""The subcommands of ``hybridcomp``, one module each; ``cli`` parses the arguments."""
