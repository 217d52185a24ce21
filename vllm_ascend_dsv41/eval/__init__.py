"""Accuracy and speed of a running service, measured so that the numbers can be trusted and compared."""
