"""Exact nearest neighbours and the weighted vote."""
