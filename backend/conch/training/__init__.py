"""Trains an EAGLE head for a model, from text that the model itself writes."""
