"""Files of rows, wherever they lie: found, opened, unpacked, and read row by row."""
