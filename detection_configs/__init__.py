"""Detection configs as package data, so that the YAML files are found after installation."""
