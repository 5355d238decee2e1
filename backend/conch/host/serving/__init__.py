"""Running tritonserver: find it, start it, watch it, and leave nothing behind."""
