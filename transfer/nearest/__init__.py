"""kNN classification and retrieval."""
