"""Running a server: start, demo, self test."""
