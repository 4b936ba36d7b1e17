"""The settings (schema/), how they are read, and their checks. Imports no torch."""
