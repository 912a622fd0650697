"""Peers' checkpoints, in every common dialect, read without running anything in them."""
