"""Load over the wire, and the arithmetic on what came back. Imports nothing of the engine."""
