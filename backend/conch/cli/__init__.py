"""The `conch` command."""
