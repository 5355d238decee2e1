"""A model divided among ranks: which slices a rank holds, and what ranks tell each other in a step."""
