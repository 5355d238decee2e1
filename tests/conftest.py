"""For all tests: compute threads that wait must not spin, as in the engine process."""

from conch.engine.environment import settle_environment

settle_environment()
