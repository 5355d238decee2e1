"""KV connectors: how KV moves between engines."""
