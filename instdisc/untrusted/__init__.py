"""Files of unknown origin: read within bounds, and nothing in them is run."""
