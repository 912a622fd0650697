"""The backbones, every name that --weights takes, initialisation from data."""
