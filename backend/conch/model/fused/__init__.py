"""The fused decoder: models of the common families, described by data and run a whole step at a time."""
