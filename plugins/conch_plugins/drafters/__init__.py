"""Drafters: guesses at the tokens that come next."""
