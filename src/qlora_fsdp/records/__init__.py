"""What a run leaves behind: its folder and log, summary.json, metrics.jsonl, and what trackers and the hub get."""
