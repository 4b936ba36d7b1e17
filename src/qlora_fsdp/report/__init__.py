"""report.html: one file about a run, or one that compares several. Imports no torch and needs no network."""
