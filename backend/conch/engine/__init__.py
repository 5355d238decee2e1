"""The loop: core, request table, catalogue of plugins, engine process and its protocol."""
