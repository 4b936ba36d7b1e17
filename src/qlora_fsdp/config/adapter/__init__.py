"""What the folder of a saved adapter says, which anybody may have written: its settings and its base's."""
