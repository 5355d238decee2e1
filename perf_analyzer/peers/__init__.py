"""`make bench-peers`: other engines on the same model, machine and work, in alternation with ours."""
