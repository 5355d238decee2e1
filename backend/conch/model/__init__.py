"""From a checkpoint to a runnable shard: loading, attention injection."""
