"""Can a host train? A file a topic, of checks that yield findings; the command is in `__main__`."""
