"""From model files to a sharded model: each rank reads, quantizes and writes its own rows."""
