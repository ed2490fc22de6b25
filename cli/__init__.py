"""The `kvferry` command; `main` knows the subcommands, each in a module of its own."""
