"""Semi-supervised fine-tuning and the supervised loop."""
