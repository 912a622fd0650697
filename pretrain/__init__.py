"""Instance-discrimination pretraining (the paper, sections 3 and 4.2)."""
