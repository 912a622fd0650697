"""Rows of results as tables, figures and a page beside the published numbers."""
