"""Features of images: extracted, and stored on disk."""
