"""From what is typed and what files say to a `Config`: the command line, files of settings, Hydra."""
