"""Processes: how they meet, watch one another and end together, and the hardware that they run on."""
